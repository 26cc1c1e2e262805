#include "src/engine/step/activation_memory.h"

#include <algorithm>

namespace penstock::engine {

ActivationMemory::ActivationMemory(size_t num_units, const mem::Tiers& tiers, const Config& config)
    : tiers_(tiers),
      in_stages_(config.mesh.pipeline > 1),
      units_(num_units),
      over_(config.parallel.virtual_stages > 1 ||
            (in_stages_ && config.parallel.schedule == "zero_bubble")) {}

// An accelerator's allocator also counts the buffers of the engine.
int64_t ActivationMemory::now() const { return memory_->now() - tiers_.accelerator.held(); }

void ActivationMemory::begin_window() {
  if (!over_ && memory_ == nullptr) {
    memory_ = device::count_tensors(tiers_.computes);
    over_ = memory_ == nullptr;
  }
  if (over_) return device::disturb_counts();
  begin_ = last_ = now();
  memory_->take_peak();
  peak_ = 0;
}

void ActivationMemory::begin_section(bool forward, bool backward) {
  trains_ = forward || backward;
  if (!trains_) return;
  if (!(forward && after_forward_ && !in_stages_)) ++section_;
  after_forward_ = forward;
}

void ActivationMemory::event(Op op, int unit, bool ends) {
  if (memory_ == nullptr || !trains_) return;
  UnitSums& sums = units_[static_cast<size_t>(unit)];
  StretchSum& sum = op == Op::kForward ? (ends ? sums.forward_end : sums.forward_begin)
                                       : (ends ? sums.backward_end : sums.backward_begin);
  if (sum.section != section_) sum = {{}, section_};
  const int64_t now = this->now();
  const int64_t peak = std::max({memory_->take_peak() - tiers_.accelerator.held(), last_, now});
  sum.stretch.over = std::max(sum.stretch.over, sum.stretch.change + peak - last_);
  sum.stretch.change += now - last_;
  peak_ = std::max(peak_, peak - begin_);
  last_ = now;
}

void ActivationMemory::end_step() {
  if (memory_ == nullptr) return;
  if (++steps_ < 2) {
    units_.assign(units_.size(), {});
    return;
  }
  if (memory_->alone()) {
    measured_ = peak_;
    for (const UnitSums& sums : units_) {
      found_.push_back({sums.forward_begin.stretch, sums.forward_end.stretch,
                        sums.backward_begin.stretch, sums.backward_end.stretch});
    }
  }
  stop();
}

void ActivationMemory::stop() {
  memory_.reset();
  over_ = true;
}

void ActivationMemory::put_into(ModelDesc& model) const {
  for (size_t unit = 0; unit < found_.size(); ++unit) model.units[unit].tensors = found_[unit];
}

}  // namespace penstock::engine
