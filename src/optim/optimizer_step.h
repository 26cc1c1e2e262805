#pragma once
// One optimizer step over a range of one flat buffer: from a parameter group's settings to the
// kernel that computes them. Stateless; any thread.
#include <cstdint>

#include "penstock/config.h"
#include "src/optim/kernels.h"

namespace penstock::optim {

// `moment1` and `moment2` hold range.numel values of range.moment_dtype each, or are null beyond
// num_moments(group). `step` is 1 for the range's first update; `grad_scale` multiplies gradients.
// All of it is in range.device's memory; a device's work is queued on this thread's stream.
void run_optimizer(const OptimizerConfig& group, const Range& range, void* moment1, void* moment2,
                   float grad_scale, int64_t step);

}  // namespace penstock::optim
