#pragma once
// The learning rate over the steps, as a factor of the optimizer's lr. A pure function; any thread.
#include <cstdint>

#include "penstock/config.h"

namespace penstock {

// Factor for update number `step` (1 for the first). Warm-up rises linearly, 1 / warmup_steps at
// step 1 and 1 at step warmup_steps; then "constant" stays, "linear" and "cosine"
// (arXiv:1608.03983, no restarts) fall to min_ratio at total_steps and stay there.
double lr_factor(const ScheduleConfig& schedule, int64_t step);

}  // namespace penstock
