#pragma once
// OutsideEdits: finds what users changed in parameters and gradients between the engine's calls.
//
// [Note: At the border] Parameters are the user's objects. When a parameter is edited, gets new
// memory or is swapped, torch sends no event. So each call of the engine compares every parameter
// with the state in which the engine left it. A change that the engine can take over has the same
// effect as in torch. Any other change raises an error that names the parameter.
//
//   values edited in place   the update adds them to the masters (Updates::take_edits); gathered
//                            values that are not written back are compared before they are freed
//   new memory (p.data=x)    the engine copies the values to every copy and gives the parameter a
//                            window again; other tensors that share the old memory keep it
//   new dtype or shape,
//   swapped tensors          refused
//
// [Note: Hollow gradients] The gradients are in the engine's copies, under the table's placements.
// Between a backward and its step, `.grad` of a parameter with a gradient is a tensor of the same
// shape without memory. So `.grad is None` means the same as in torch. Reading this tensor's values
// raises an error that names the engine's calls for gradients. Setting `.grad` to None drops the
// gradient.
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "src/exec/executor.h"
#include "src/tiles/weights.h"

namespace penstock::engine {

// Used only by the model's thread (by autograd's thread while a backward runs). The executor must
// outlive this object.
class OutsideEdits {
 public:
  // The parameters must have their windows already. `stays`: returns whether a unit stays whole
  // between forwards without a context in which users may write to it.
  OutsideEdits(exec::Executor& executor, const tiles::TiledWeights& tiled,
               std::function<bool(int unit)> stays);

  // Takes over the values of parameters that got new memory. Throws RuntimeFault for a change that
  // it cannot take over, such as an edit in place of a unit that stays whole.
  void look_at_params();
  // Returns the first gathered parameter of the unit that was written to in place, or "". It checks
  // torch's version counter, then the values, because torch does not count writes to `.data`. Only
  // this rank's shard is compared. If the shard must be read from disk or copied to a device for
  // the comparison, only the first four calls (of a frozen unit the first) and every 32nd call
  // compare values, unless `always` is set.
  std::string edited(int unit, bool always);
  // Throws a RuntimeFault which says that the edit of `param` would be lost. Does nothing if
  // `param` is "".
  static void refuse_edit(const std::string& param, const char* where);

  // Preserve the values of views of the unit's parameters that are taken after keep_views(). If
  // there are such views, leave_views() gives the parameter a new storage, and the views a copy of
  // the values. It skips a parameter that already had views at keep_views(), because those stay
  // views of the parameter. The unit must be gathered.
  void keep_views(int unit);
  void leave_views(int unit);

  enum class SeenGradients { kKept, kSomeDropped, kAllDropped };
  // Finds changes of `.grad`. Drops the gradients that users set to None. If users set all
  // gradients to None, drops none, because the caller then drops the window. Throws RuntimeFault if
  // users assigned a `.grad`. Before a backward (`adds`), throws only if the assigned gradient
  // replaced a hollow one.
  SeenGradients look_at_gradients(bool adds);
  void show_gradients();
  void hide_gradients();
  // Returns whether a contribution of this rank is not finite and was not replaced.
  bool any_bad() const;

 private:
  struct Place {
    exec::UnitState* unit;
    exec::Flat* flat;
    exec::Slot* slot;
  };
  struct Param {
    std::string name;
    at::Tensor tensor;  // the user's parameter
    std::vector<int64_t> sizes;
    const void* object;         // its Python object at initialize(); null without Python
    std::vector<Place> places;  // one place, or one per tile
    bool trainable;
    // Storage of a parameter in tiles. For other parameters, Slot::window has the storage.
    c10::Storage tiled;
    at::Tensor mark{};   // see [Note: Hollow gradients]
    bool shown = false;  // `.grad` is `mark`
    bool alone = false;  // at keep_views() no other tensor shared the storage
  };

  void look_at(Param& param);
  std::string touched(const exec::UnitState& unit) const;
  void take_over(Param& param);
  device::Address part_from_views(Param& param);
  void forget(Param& param);

  exec::Executor& executor_;
  const std::function<bool(int unit)> stays_;
  std::vector<Param> params_;
  std::vector<int> looks_;  // by unit: number of edited() calls that could skip the comparison
};

}  // namespace penstock::engine
