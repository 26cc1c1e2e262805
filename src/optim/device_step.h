#pragma once
// The optimizers on a device, made of torch's operations. They use the formulas of kernels.h, in
// the same order. All work is queued on the calling thread's stream.
#include <cstdint>

#include "penstock/config.h"
#include "src/optim/kernels.h"

namespace penstock::optim {

// The arguments of run_optimizer(). All addresses are in range.device's memory.
struct DeviceStep {
  const Range& range;
  void *moment1, *moment2;
  float grad_scale;
  int64_t step;
};

void run_on_device(const OptimizerConfig& group, const DeviceStep& step);

}  // namespace penstock::optim
