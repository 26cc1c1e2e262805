#include "penstock/config.h"

#include <cmath>
#include <numbers>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

// Warm-up reaches the full lr at step warmup_steps; the decay starts at that step.
double lr_factor(const ScheduleConfig& schedule, int64_t step) {
  PENSTOCK_ASSERT(step >= 1, concat("step ", step, "; the first update is step 1"));
  if (schedule.type == "none") return 1.0;
  if (step < schedule.warmup_steps)
    return static_cast<double>(step) / static_cast<double>(schedule.warmup_steps);
  if (schedule.type == "constant" || step <= schedule.warmup_steps) return 1.0;
  if (step >= schedule.total_steps) return schedule.min_ratio;
  const double progress = static_cast<double>(step - schedule.warmup_steps) /
                          static_cast<double>(schedule.total_steps - schedule.warmup_steps);
  const double left = schedule.type == "cosine"
                          ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress))
                          : 1.0 - progress;
  return schedule.min_ratio + (1.0 - schedule.min_ratio) * left;
}

}  // namespace penstock
