#include "src/optim/device_step.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <iterator>

#include "penstock/optimizer_kinds.h"
#include "src/device/device.h"

namespace penstock::optim {

namespace {

// The tensors of one update.
struct DeviceUpdate {
  const OptimizerConfig& group;
  const int64_t step;
  at::Tensor master;
  at::Tensor grad;              // a scaled fp32 copy, which the step may overwrite
  at::Tensor moment1, moment2;  // undefined if the optimizer has no such moment
};

// A moment in fp32. store() writes it back in the dtype of the stored moment.
class Wide {
 public:
  explicit Wide(const at::Tensor& kept) : kept_(kept), values_(kept.to(at::kFloat)) {}
  at::Tensor& operator*() { return values_; }
  void store() const {
    if (!values_.is_same(kept_)) kept_.copy_(values_);
  }

 private:
  const at::Tensor kept_;
  at::Tensor values_;
};

void decay(DeviceUpdate& work, bool decoupled) {
  const double weight_decay = work.group.weight_decay;
  if (weight_decay == 0.0) return;
  if (decoupled) {
    work.master.mul_(1.0 - work.group.lr * weight_decay);
  } else {
    work.grad.add_(work.master, weight_decay);
  }
}

// torch's fused kernels compute fp32 moments in one pass; adam() below handles bf16 moments.
void fused_adam(const DeviceUpdate& work, bool decoupled) {
  const OptimizerConfig& group = work.group;
  const at::Tensor step =
      at::full({}, static_cast<double>(work.step), work.master.options().dtype(at::kFloat));
  const auto run = [&](const auto& fused) {
    fused({work.master}, {work.grad}, {work.moment1}, {work.moment2}, {}, {step});
  };
  using List = at::TensorList;
  if (decoupled) {
    run([&](List p, List g, List m, List v, List most, List steps) {
      at::_fused_adamw_(p, g, m, v, most, steps, group.lr, group.betas[0], group.betas[1],
                        group.weight_decay, group.eps, false, false);
    });
  } else {
    run([&](List p, List g, List m, List v, List most, List steps) {
      at::_fused_adam_(p, g, m, v, most, steps, group.lr, group.betas[0], group.betas[1],
                       group.weight_decay, group.eps, false, false);
    });
  }
}

void adam(DeviceUpdate& work) {
  const OptimizerConfig& group = work.group;
  const bool decoupled = kind_of(group.type).decoupled_decay;
  if (work.moment1.scalar_type() == at::kFloat) return fused_adam(work, decoupled);
  decay(work, decoupled);
  Wide first(work.moment1), second(work.moment2);
  const double beta1 = group.betas[0], beta2 = group.betas[1];
  const auto steps = static_cast<double>(work.step);
  (*first).lerp_(work.grad, 1.0 - beta1);
  (*second).mul_(beta2).addcmul_(work.grad, work.grad, 1.0 - beta2);
  const double size = group.lr / (1.0 - std::pow(beta1, steps));
  const double root = std::sqrt(1.0 - std::pow(beta2, steps));
  work.master.addcdiv_(*first, (*second).sqrt().div_(root).add_(group.eps), -size);
  first.store();
  second.store();
}

void sgd(DeviceUpdate& work) {
  const OptimizerConfig& group = work.group;
  decay(work, false);
  if (group.momentum == 0.0) {
    work.master.add_(work.grad, -group.lr);
    return;
  }
  Wide momentum(work.moment1);
  if (work.step == 1) {
    (*momentum).copy_(work.grad);
  } else {
    (*momentum).mul_(group.momentum).add_(work.grad, 1.0 - group.dampening);
  }
  const at::Tensor direction =
      group.nesterov ? work.grad.add(*momentum, group.momentum) : *momentum;
  work.master.add_(direction, -group.lr);
  momentum.store();
}

void adagrad(DeviceUpdate& work) {
  const OptimizerConfig& group = work.group;
  decay(work, false);
  const double lr = group.lr / (1.0 + static_cast<double>(work.step - 1) * group.lr_decay);
  work.moment1.addcmul_(work.grad, work.grad);
  work.master.addcdiv_(work.grad, work.moment1.sqrt().add_(group.eps), -lr);
}

void lion(DeviceUpdate& work) {
  const OptimizerConfig& group = work.group;
  decay(work, true);
  Wide average(work.moment1);
  work.master.add_((*average).lerp(work.grad, 1.0 - group.betas[0]).sign_(), -group.lr);
  (*average).lerp_(work.grad, 1.0 - group.betas[1]);
  average.store();
}

// Indexed by OptimizerType.
constexpr void (*kSteps[])(DeviceUpdate&) = {adam, adam, sgd, adagrad, lion};
static_assert(std::size(kSteps) == kNumOptimizerTypes, "one step for each OptimizerType");

}  // namespace

void run_on_device(const OptimizerConfig& group, const DeviceStep& step) {
  const device::Unseen unseen;
  const Range& range = step.range;
  const auto tensor = [&](const void* at, Dtype dtype) {
    return at == nullptr ? at::Tensor()
                         : device::view({const_cast<void*>(at), range.device}, dtype, range.numel);
  };
  DeviceUpdate work{group,
                    step.step,
                    tensor(range.master, Dtype::kFp32),
                    tensor(range.grad, range.grad_dtype).to(at::kFloat, false, /*copy=*/true),
                    tensor(step.moment1, range.moment_dtype),
                    tensor(step.moment2, range.moment_dtype)};
  if (step.grad_scale != 1.0F) work.grad.mul_(step.grad_scale);
  kSteps[static_cast<size_t>(group.type)](work);
  if (range.param_out != nullptr) tensor(range.param_out, range.param_dtype).copy_(work.master);
}

}  // namespace penstock::optim
