#pragma once
// The optimizers on a device, made of torch's operations. They use the formulas of kernels.h, in
// the same order. All work is queued on the calling thread's stream.
#include <vector>

#include "penstock/config.h"
#include "src/optim/optimizer_step.h"

namespace penstock::optim {

// Takes the arguments of run_optimizer(). All addresses are in the memory of the runs' device.
void run_on_device(const std::vector<OptimizerConfig>& groups, const std::vector<StepRun>& runs,
                   float grad_scale, StepScalars* scalars);

}  // namespace penstock::optim
