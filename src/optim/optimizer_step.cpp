#include "src/optim/optimizer_step.h"

#include <iterator>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/text.h"
#include "src/optim/device_step.h"

namespace penstock::optim {

namespace {

// One run with its settings. Each function below maps them to the options of its kernel.
struct KernelCall {
  const OptimizerConfig& group;
  const StepRun& run;
  float grad_scale;
};

void adam(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  const bool decoupled = kind_of(group.type).decoupled_decay;
  optim::adam(call.run.range, call.run.moment1, call.run.moment2,
              {group.lr, group.betas[0], group.betas[1], group.eps, group.weight_decay, decoupled,
               call.grad_scale, call.run.step, call.run.second(), call.run.keeps_second});
}

void sgd(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  optim::sgd(call.run.range, call.run.moment1,
             {group.lr, group.momentum, group.dampening, group.weight_decay, group.nesterov,
              call.grad_scale, call.run.step == 1});
}

void adagrad(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  optim::adagrad(
      call.run.range, static_cast<float*>(call.run.moment1),
      {group.lr, group.lr_decay, group.eps, group.weight_decay, call.grad_scale, call.run.step});
}

void lion(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  optim::lion(call.run.range, call.run.moment1,
              {group.lr, group.betas[0], group.betas[1], group.weight_decay, call.grad_scale});
}

struct Kernel {
  OptimizerType type;
  void (*run)(const KernelCall&);
};

// Indexed by OptimizerType.
constexpr Kernel kKernels[] = {
    {OptimizerType::kAdamW, adam},      {OptimizerType::kAdam, adam}, {OptimizerType::kSgd, sgd},
    {OptimizerType::kAdagrad, adagrad}, {OptimizerType::kLion, lion},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kKernels); ++i)
    if (kKernels[i].type != static_cast<OptimizerType>(i)) return false;
  return true;
}
static_assert(std::size(kKernels) == kNumOptimizerTypes && in_order(),
              "one kernel for each OptimizerType, in its order");

}  // namespace

void run_optimizer(const std::vector<OptimizerConfig>& groups, const std::vector<StepRun>& runs,
                   float grad_scale, StepScalars* scalars) {
  if (runs.empty()) return;
  for (const StepRun& run : runs) {
    const OptimizerConfig& group = groups.at(run.group);
    const OptimizerKind& kind = kind_of(group.type);
    const int kept = (run.moment1 != nullptr ? 1 : 0) + (run.moment2 != nullptr ? 1 : 0);
    PENSTOCK_ASSERT(kept >= num_moments(group), concat("[optim::run_optimizer] ", kind.name,
                                                       " was called with ", kept, " moments"));
    PENSTOCK_ASSERT(run.range.moment_dtype == Dtype::kFp32 || kind.takes("moments_dtype"),
                    concat("[optim::run_optimizer] ", kind.name, " cannot have moments in ",
                           dtype_name(run.range.moment_dtype)));
  }
  if (runs.front().range.device != nullptr) return run_on_device(groups, runs, grad_scale, scalars);
  for (const StepRun& run : runs) {
    const OptimizerConfig& group = groups[run.group];
    kKernels[static_cast<size_t>(group.type)].run({group, run, grad_scale});
  }
}

}  // namespace penstock::optim
