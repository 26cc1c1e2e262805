#pragma once
// ActivationMemory: measures the memory of the tensors with which the model computes. Used by the
// same threads as Core::State.
//
// [Note: Memory of activations] The engine does not allocate the tensors that a forward keeps for
// its backward, and no config tells their sizes. So the first two steps measure them. Each event of
// a unit (its forward or backward begins or ends) ends a stretch: the time since the event before
// it, with everything that the model, the loss and the user's code did in that time. The end of the
// whole backward is the end of the root's. The stretches of each unit's last micro-batch in step
// two become part of the model description, and the simulator adds them at the lines of the same
// events, for any table. Step one is only counted: it also allocates what later steps keep, such as
// tables of positions. If the model computes with tensors of other sizes later, the ledger still
// shows those of step two. Steps that are skipped because of an overflow are not among the two.
#include <cstdint>
#include <memory>
#include <vector>

#include "penstock/config.h"
#include "src/device/tensor_memory.h"
#include "src/mem/tiers.h"
#include "src/plan/model_desc.h"
#include "src/plan/plan.h"

namespace penstock::engine {

class ActivationMemory {
 public:
  // The tiers must outlive this object. Does not count if a rank has several stages: the stretches
  // of units that all stages visit would differ from stage to stage.
  ActivationMemory(size_t num_units, const mem::Tiers& tiers, const Config& config);

  // The first forward of an accumulation window begins. Starts to count in the first window.
  void begin_window();
  // A section of the plan begins. Only events in a forward or backward that trains are counted; the
  // others become part of the next stretch. Without stages, forwards without a backward between
  // them count as one, because one backward goes through all of them.
  void begin_section(bool forward, bool backward);
  void end_section() { trains_ = false; }
  // The unit's forward or backward has begun or ended.
  void event(Op op, int unit, bool ends);
  // A step has ended. Ends the counting after step two.
  void end_step();
  void stop();  // counts no more

  // Gives `model` the stretches, if they are known.
  void put_into(ModelDesc& model) const;
  // Returns the peak bytes in step two, or 0 if they are not known.
  int64_t peak() const { return measured_; }

 private:
  struct StretchSum {
    TensorStretch stretch;
    int64_t section = 0;  // whose events it has
  };
  struct UnitSums {
    StretchSum forward_begin, forward_end, backward_begin, backward_end;
  };
  int64_t now() const;

  const mem::Tiers& tiers_;
  const bool in_stages_;
  std::unique_ptr<device::TensorMemory> memory_;  // null: not counting
  std::vector<UnitSums> units_;
  std::vector<UnitTensors> found_;               // by unit; empty: not known
  bool over_;                                    // does not count again
  bool trains_ = false, after_forward_ = false;  // the section in progress; the last one
  int64_t steps_ = 0, section_ = 0;
  int64_t begin_ = 0, last_ = 0;  // bytes at the beginning of the window; at the last event
  int64_t peak_ = 0, measured_ = 0;
};

}  // namespace penstock::engine
