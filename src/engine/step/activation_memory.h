#pragma once
// ActivationMemory: measures the memory of the tensors with which the model computes. Used by the
// same threads as Core::State.
//
// [Note: Memory of activations] The engine does not allocate the tensors that a forward keeps for
// its backward, and no config tells their sizes. So the first two steps measure them. Each event of
// a unit (its forward or backward begins or ends) ends a stretch: the time since the event before
// it, with everything that the model, the loss and the user's code did in that time. The stretches
// of the last micro-batch of step two become part of the model description, and the simulator adds
// them at the lines of the same events, for any table. Step one is not used: it also allocates what
// later steps keep, such as tables of positions. If the model computes with tensors of other sizes
// later, the ledger still shows those of step two.
#include <cstdint>
#include <memory>
#include <vector>

#include "src/device/tensor_memory.h"
#include "src/mem/tiers.h"
#include "src/plan/model_desc.h"
#include "src/plan/plan.h"

namespace penstock::engine {

class ActivationMemory {
 public:
  // The tiers must outlive this object.
  ActivationMemory(size_t num_units, const mem::Tiers& tiers);

  // The first forward of an accumulation window begins. Starts to count in the first window.
  void begin_window();
  // A section of the plan begins. `trains`: it is the forward or backward of a micro-batch. Events
  // of other sections are ignored, so their stretches become part of the next event's.
  void begin_section(bool trains) {
    ++section_;
    trains_ = trains;
  }
  // The unit's forward or backward has begun or ended.
  void event(Op op, int unit, bool ends);
  // A step has ended. After step two, gives the stretches to `model` and ends the counting.
  void end_step(ModelDesc& model);
  void stop();  // counts no more

  // Returns the peak bytes in step two, or 0 if they are not known.
  int64_t peak() const { return measured_; }

 private:
  struct Sum {
    TensorStretch stretch;
    int64_t section = 0;  // whose events it has
  };
  struct UnitSums {
    Sum forward_begin, forward_end, backward_begin, backward_end;
  };
  int64_t now() const;

  const mem::Tiers& tiers_;
  std::unique_ptr<device::TensorMemory> memory_;  // null: not counting
  std::vector<UnitSums> units_;
  bool over_ = false;    // does not count again
  bool trains_ = false;  // the section does
  int64_t steps_ = 0, section_ = 0;
  int64_t begin_ = 0, last_ = 0;  // bytes at the beginning of the window; at the last event
  int64_t peak_ = 0, measured_ = 0;
};

}  // namespace penstock::engine
