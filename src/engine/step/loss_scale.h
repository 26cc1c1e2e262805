#pragma once
// Dynamic loss scaling (arXiv:1710.03740). The scale is halved when gradients overflow, and doubled
// after a window of good steps.
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
  int64_t good_steps() const { return good_steps_; }
  // Restores the values of a checkpoint. Does nothing if the scale of this run is not dynamic.
  void restore(double value, int64_t good_steps) {
    if (!active_ || config_.window == 0) return;
    value_ = value;
    good_steps_ = good_steps;
  }

  void good_step() {
    if (!active_ || config_.window == 0 || ++good_steps_ < config_.window) return;
    good_steps_ = 0;
    value_ *= 2.0;
  }
  // Halves the scale. Returns false if the scale is already at its minimum or is not dynamic.
  bool overflow() {
    if (!active_ || config_.window == 0 || value_ <= config_.min) return false;
    good_steps_ = 0;
    value_ = value_ / 2.0 < config_.min ? config_.min : value_ / 2.0;
    return true;
  }

 private:
  LossScaleConfig config_;
  bool active_;
  double value_;
  int64_t good_steps_ = 0;
};

}  // namespace penstock::engine
