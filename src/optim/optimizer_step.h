#pragma once
// One optimizer step over runs of parameters: maps the settings of a parameter group to a kernel.
// Stateless, callable from any thread.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "penstock/config.h"
#include "src/optim/kernels.h"

namespace penstock::optim {

// Neighbouring parameters of a flat that have the same group and step count.
struct StepRun {
  Range range;
  // range.numel values of range.moment_dtype. A moment that the optimizer does not have is null.
  void *moment1 = nullptr, *moment2 = nullptr;
  size_t group = 0;  // index of the parameter group
  int64_t step = 1;  // 1 for the run's first update
  // Adam: the number of updates of the second moment, including this one; 0: the same as `step`. If
  // `keeps_second` is true, this step does not update the second moment.
  int64_t second_step = 0;
  bool keeps_second = false;

  int64_t second() const { return second_step == 0 ? step : second_step; }
  // Returns whether this step updates both moments with the same step count, as torch does.
  bool usual() const { return !keeps_second && second() == step; }
};

// Scalars in a device's memory that all calls of one step share. The first call that needs a scalar
// makes it.
struct StepScalars {
  at::Tensor scale;
  std::map<int64_t, at::Tensor> steps;  // by step count
};

// Makes one step over each run. All pointers of all runs point to the memory of one device, or of
// the host. `grad_scale` multiplies the gradients, and is the same in all calls of a step. On a
// device, the work is queued on the calling thread's stream, Adam with fp32 moments makes one fused
// call per group, and runs that are adjacent in memory are converted together.
void run_optimizer(const std::vector<OptimizerConfig>& groups, const std::vector<StepRun>& runs,
                   float grad_scale, StepScalars* scalars);

}  // namespace penstock::optim
