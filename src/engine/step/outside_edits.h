#pragma once
// OutsideEdits: what users did to parameters and gradients since the engine last looked.
//
// [Note: At the border] Parameters are the user's own objects, and torch does not tell when one is
// edited, given other memory or another identity. So at each of its calls the engine compares what
// it finds with what it left. What can be taken over counts, as in torch; the rest is an error that
// names the parameter.
//
//   values edited in place   the update takes them into the masters (Updates::take_edits); gathered
//                            values that are not written back are compared before they go
//   other memory (p.data=x)  its values go to every copy, the parameter gets a window again, and
//                            whoever shares the memory it had keeps that
//   other dtype or shape,
//   swapped tensors          refused
//
// [Note: Hollow gradients] Between a backward and its step, `.grad` of a parameter that has a
// gradient is a tensor of its shape without memory: `.grad is None` says what it says in torch,
// touching values raises an error that names the engine's call, and where users set it to None the
// gradient is dropped. The gradients themselves are in the engine's copies, as the table has them.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "src/exec/executor.h"
#include "src/tiles/weights.h"

namespace penstock::engine {

// Compute thread (autograd's while a backward runs). The executor and the weights outlive it.
class OutsideEdits {
 public:
  // The parameters have their windows.
  OutsideEdits(exec::Executor& executor, const tiles::TiledWeights& tiled);

  // What stands in a parameter's place becomes its value. Throws RuntimeFault for what cannot.
  void look_at_params();
  // The first gathered parameter of the unit that was written to in place, by torch's count of
  // writes or by its values (torch does not count those to `.data`); else empty. Only this rank's
  // part is compared. Where parameters rest on disk that is a read: unless `always`, after the
  // first looks only one of 32 compares.
  std::string edited(int unit, bool always);
  // Throws RuntimeFault that such an edit would be lost; nothing for an empty name.
  static void refuse_edit(const std::string& param, const char* where);

  enum class SeenGradients { kKept, kSomeDropped, kAllDropped };
  // What users did to `.grad`; what they set to None is forgotten unless that was all. Throws
  // RuntimeFault for one that was assigned; before a backward (`adds`) only where it hides another.
  SeenGradients look_at_gradients(bool adds);
  void show_gradients();
  void hide_gradients();
  // A contribution of this rank was not finite, and nobody replaced it.
  bool any_bad() const;

 private:
  struct Place {
    exec::UnitState* unit;
    exec::Flat* flat;
    exec::Slot* slot;
  };
  struct Param {
    std::string name;
    at::Tensor tensor;  // the user's
    std::vector<int64_t> sizes;
    const void* object;         // the Python object that it was; null without Python
    std::vector<Place> places;  // where it is kept: one, or one a tile
    bool trainable;
    c10::Storage tiled;  // its window, where it is in tiles; else in the slot
    at::Tensor mark{};   // see [Note: Hollow gradients]
    bool shown = false;
  };

  void look_at(Param& param);
  void take_over(Param& param);
  void forget(Param& param);

  exec::Executor& executor_;
  std::vector<Param> params_;
  std::vector<int> looks_;  // by unit: for edits, where not always
};

}  // namespace penstock::engine
