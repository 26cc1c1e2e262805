#include "src/optim/optimizer_step.h"

#include <iterator>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/text.h"
#include "src/optim/device_step.h"

namespace penstock::optim {

namespace {

// The arguments of one run_optimizer() call. Each function below maps them to the options of its
// kernel.
struct KernelCall {
  const OptimizerConfig& group;
  const Range& range;
  void *moment1, *moment2;
  float grad_scale;
  int64_t step;
};

void adam(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  const bool decoupled = kind_of(group.type).decoupled_decay;
  optim::adam(call.range, call.moment1, call.moment2,
              {group.lr, group.betas[0], group.betas[1], group.eps, group.weight_decay, decoupled,
               call.grad_scale, call.step});
}

void sgd(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  optim::sgd(call.range, call.moment1,
             {group.lr, group.momentum, group.dampening, group.weight_decay, group.nesterov,
              call.grad_scale, call.step == 1});
}

void adagrad(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  optim::adagrad(
      call.range, static_cast<float*>(call.moment1),
      {group.lr, group.lr_decay, group.eps, group.weight_decay, call.grad_scale, call.step});
}

void lion(const KernelCall& call) {
  const OptimizerConfig& group = call.group;
  optim::lion(call.range, call.moment1,
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

void run_optimizer(const OptimizerConfig& group, const Range& range, void* moment1, void* moment2,
                   float grad_scale, int64_t step) {
  const OptimizerKind& kind = kind_of(group.type);
  const int kept = (moment1 != nullptr ? 1 : 0) + (moment2 != nullptr ? 1 : 0);
  PENSTOCK_ASSERT(kept >= num_moments(group), concat("[optim::run_optimizer] ", kind.name,
                                                     " was called with ", kept, " moments"));
  PENSTOCK_ASSERT(range.moment_dtype == Dtype::kFp32 || kind.takes("moments_dtype"),
                  concat("[optim::run_optimizer] ", kind.name, " cannot have moments in ",
                         dtype_name(range.moment_dtype)));
  if (range.device != nullptr) {
    return run_on_device(group, {range, moment1, moment2, grad_scale, step});
  }
  kKernels[static_cast<size_t>(group.type)].run({group, range, moment1, moment2, grad_scale, step});
}

}  // namespace penstock::optim
