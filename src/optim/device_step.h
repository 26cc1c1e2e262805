#pragma once
// The optimizers on a device, of torch's operations: the formulas and their order are those of
// kernels.h. Everything is queued on this thread's stream.
#include <cstdint>

#include "penstock/config.h"
#include "src/optim/kernels.h"

namespace penstock::optim {

// What run_optimizer() was given; all addresses are range.device's.
struct DeviceStep {
  const Range& range;
  void *moment1, *moment2;
  float grad_scale;
  int64_t step;
};

void run_on_device(const OptimizerConfig& group, const DeviceStep& step);

}  // namespace penstock::optim
