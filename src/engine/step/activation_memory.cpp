#include "src/engine/step/activation_memory.h"

#include <algorithm>

namespace penstock::engine {

ActivationMemory::ActivationMemory(size_t num_units, const mem::Tiers& tiers)
    : tiers_(tiers), units_(num_units) {}

// An accelerator's allocator also counts the buffers of the engine.
int64_t ActivationMemory::now() const { return memory_->now() - tiers_.accelerator.held(); }

void ActivationMemory::begin_window() {
  if (over_) return;
  if (memory_ == nullptr) {
    memory_ = device::count_tensors(tiers_.computes);
    over_ = memory_ == nullptr;
    if (over_) return;
  }
  begin_ = last_ = now();
  memory_->take_peak();
  peak_ = 0;
}

void ActivationMemory::event(Op op, int unit, bool ends) {
  if (memory_ == nullptr || !trains_) return;
  UnitSums& sums = units_[static_cast<size_t>(unit)];
  Sum& sum = op == Op::kForward ? (ends ? sums.forward_end : sums.forward_begin)
                                : (ends ? sums.backward_end : sums.backward_begin);
  if (sum.section != section_) sum = {{}, section_};
  const int64_t now = this->now();
  const int64_t peak = std::max({memory_->take_peak() - tiers_.accelerator.held(), last_, now});
  sum.stretch.over = std::max(sum.stretch.over, sum.stretch.change + peak - last_);
  sum.stretch.change += now - last_;
  peak_ = std::max(peak_, peak - begin_);
  last_ = now;
}

void ActivationMemory::end_step(ModelDesc& model) {
  if (memory_ == nullptr || ++steps_ < 2) return;
  const bool alone = memory_->alone();
  stop();
  if (!alone) return;
  measured_ = peak_;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const UnitSums& sums = units_[unit];
    model.units[unit].tensors = {sums.forward_begin.stretch, sums.forward_end.stretch,
                                 sums.backward_begin.stretch, sums.backward_end.stretch};
  }
}

void ActivationMemory::stop() {
  memory_.reset();
  over_ = true;
}

}  // namespace penstock::engine
