#pragma once
// Dynamic loss scaling (arXiv:1710.03740). The scale is halved when gradients overflow, and doubled
// after a window of good steps. The first `hysteresis` - 1 overflows do not halve it.
#include "penstock/config.h"

namespace penstock::engine {

class LossScale {
 public:
  // `active`: the model trains in fp16. Otherwise the scale stays 1.
  LossScale(const LossScaleConfig& config, bool active)
      : config_(config), active_(active), value_(active ? config.initial : 1.0) {}

  bool active() const { return active_; }
  bool dynamic() const { return active_ && config_.window > 0; }
  double value() const { return value_; }
  // Returns whether a backward from an unscaled loss gives wrong gradients.
  bool needs_scaling() const { return active_ && (config_.window > 0 || value_ != 1.0); }
  int64_t good_steps() const { return good_steps_; }
  int64_t tolerated() const { return tolerated_; }
  // Restores the values of a checkpoint. Does nothing if the scale of this run is not dynamic.
  void restore(double value, int64_t good_steps, int64_t tolerated) {
    if (!dynamic()) return;
    value_ = value;
    good_steps_ = good_steps;
    tolerated_ = tolerated;
  }

  void good_step() {
    if (!dynamic()) return;
    if (config_.refill == "step") tolerated_ = 0;
    if (++good_steps_ < config_.window + config_.settle) return;
    good_steps_ = config_.settle;
    tolerated_ = 0;
    value_ *= 2.0;
  }
  // Counts the overflow, and halves the scale unless the overflow is tolerated. Returns false if
  // the scale is already at its minimum or is not dynamic.
  bool overflow() {
    if (!dynamic()) return false;
    good_steps_ = 0;
    if (tolerated_ + 1 < config_.hysteresis) return ++tolerated_ > 0;
    if (value_ <= config_.min) return false;
    value_ = value_ / 2.0 < config_.min ? config_.min : value_ / 2.0;
    return true;
  }

 private:
  LossScaleConfig config_;
  bool active_;
  double value_;
  int64_t good_steps_ = 0;  // since the last overflow, or since the scale doubled
  int64_t tolerated_ = 0;   // overflows that did not halve the scale
};

}  // namespace penstock::engine
