#pragma once
// One optimizer step over a range of one flat: maps the settings of a parameter group to a kernel.
// Stateless, callable from any thread.
#include <cstdint>

#include "penstock/config.h"
#include "src/optim/kernels.h"

namespace penstock::optim {

// `moment1` and `moment2` have range.numel values of range.moment_dtype. If num_moments(group) is
// less than 2, the unused ones are null. `step` is 1 for the range's first update. `grad_scale`
// multiplies the gradients. All pointers point to range.device's memory. On a device the work is
// queued on the calling thread's stream.
void run_optimizer(const OptimizerConfig& group, const Range& range, void* moment1, void* moment2,
                   float grad_scale, int64_t step);

}  // namespace penstock::optim
