#include "src/optim/device_step.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "penstock/optimizer_kinds.h"
#include "src/device/device.h"
#include "src/optim/fused_step.h"

namespace penstock::optim {

namespace {

// Number of values that are updated together. Their fp32 gradients are the memory that an update
// takes beside its state.
constexpr int64_t kTogether = int64_t{1} << 24;

// The tensors of one run.
struct DeviceUpdate {
  const OptimizerConfig& group;
  const StepRun run;
  at::Tensor master;
  at::Tensor grad;              // a scaled fp32 copy, which the step may overwrite
  at::Tensor moment1, moment2;  // undefined if the optimizer has no such moment
};

// Runs with the same group and step counts.
using DeviceUpdates = std::vector<DeviceUpdate>;
using GroupAndStep = std::tuple<size_t, int64_t, int64_t, bool>;

GroupAndStep key_of(const StepRun& run) {
  return {run.group, run.step, run.second(), run.keeps_second};
}

std::map<GroupAndStep, std::vector<StepRun>> by_group_and_step(const std::vector<StepRun>& runs) {
  std::map<GroupAndStep, std::vector<StepRun>> alike;
  for (const StepRun& run : runs) alike[key_of(run)].push_back(run);
  return alike;
}

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

// torch's fused kernels compute fp32 moments in one pass over all runs; adam() below handles bf16
// moments.
void fused_adam(const DeviceUpdates& updates, bool decoupled, StepScalars* scalars) {
  const OptimizerConfig& group = updates.front().group;
  std::vector<at::Tensor> p, g, m, v;
  for (const DeviceUpdate& update : updates) {
    p.push_back(update.master);
    g.push_back(update.grad);
    m.push_back(update.moment1);
    v.push_back(update.moment2);
  }
  const int64_t count = updates.front().run.step;
  at::Tensor& step = scalars->steps[count];
  if (!step.defined())
    step = at::full({}, static_cast<double>(count), p.front().options().dtype(at::kFloat));
  const std::vector<at::Tensor> steps(updates.size(), step);
  const auto& [beta1, beta2] = group.betas;
  if (decoupled) {
    at::_fused_adamw_(p, g, m, v, {}, steps, group.lr, beta1, beta2, group.weight_decay, group.eps,
                      false, false);
  } else {
    at::_fused_adam_(p, g, m, v, {}, steps, group.lr, beta1, beta2, group.weight_decay, group.eps,
                     false, false);
  }
}

void adam(DeviceUpdate& work) {
  const OptimizerConfig& group = work.group;
  const bool decoupled = kind_of(group.type).decoupled_decay;
  decay(work, decoupled);
  Wide first(work.moment1), second(work.moment2);
  const double beta1 = group.betas[0], beta2 = group.betas[1];
  const auto steps = static_cast<double>(work.run.step);
  const auto second_steps = static_cast<double>(work.run.second());
  (*first).lerp_(work.grad, 1.0 - beta1);
  const double size = group.lr / (1.0 - std::pow(beta1, steps));
  const double root = std::sqrt(1.0 - std::pow(beta2, second_steps));
  if (work.run.keeps_second) {  // as in kernels_update.cpp
    const at::Tensor least =
        (*first).abs().mul_(least_root(beta1, beta2) / (1.0 - std::pow(beta1, steps)) * root);
    (*second).copy_(at::where(least.gt((*second).sqrt()), least.square(), *second));
  } else {
    (*second).mul_(beta2).addcmul_(work.grad, work.grad, 1.0 - beta2);
  }
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
  if (work.run.step == 1) {
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
  const double lr = group.lr / (1.0 + static_cast<double>(work.run.step - 1) * group.lr_decay);
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

void step_alike(DeviceUpdates& updates, StepScalars* scalars) {
  const OptimizerConfig& group = updates.front().group;
  const OptimizerKind& kind = kind_of(group.type);
  const bool is_adam = group.type == OptimizerType::kAdam || group.type == OptimizerType::kAdamW;
  const bool fuses = is_adam && updates.front().run.usual();
  if (fuses && updates.front().moment1.scalar_type() == at::kFloat)
    return fused_adam(updates, kind.decoupled_decay, scalars);
  for (DeviceUpdate& update : updates) kSteps[static_cast<size_t>(group.type)](update);
}

at::Tensor view(const Range& range, const void* at, Dtype dtype, int64_t numel) {
  if (at == nullptr) return {};
  return device::view({const_cast<void*>(at), range.device}, dtype, numel);
}

// Returns the address after `numel` values; null stays null.
void* after(const void* at, Dtype dtype, int64_t numel) {
  if (at == nullptr) return nullptr;
  return const_cast<char*>(static_cast<const char*>(at)) + numel * dtype_bytes(dtype);
}

// Calls one(range, numel) for each longest sequence of runs that `adjoin`: the range of its first
// run and its number of values.
template <class Adjoin, class One>
void for_each_sequence(const std::vector<StepRun>& runs, const Adjoin& adjoin, const One& one) {
  for (size_t first = 0; first < runs.size();) {
    const Range& range = runs[first].range;
    int64_t numel = range.numel;
    size_t next = first + 1;
    while (next < runs.size() && adjoin(range, numel, runs[next].range)) {
      numel += runs[next++].range.numel;
    }
    one(range, numel);
    first = next;
  }
}

// Returns the gradient of each run in fp32, multiplied by the scale. One kernel converts and scales
// a sequence of runs.
std::vector<at::Tensor> wide_gradients(const std::vector<StepRun>& runs, float scale,
                                       at::Tensor* factor) {
  std::vector<at::Tensor> gradients;
  const auto adjoin = [](const Range& first, int64_t numel, const Range& next) {
    return first.grad_dtype == next.grad_dtype &&
           after(first.grad, first.grad_dtype, numel) == next.grad;
  };
  for_each_sequence(runs, adjoin, [&](const Range& range, int64_t numel) {
    const at::Tensor own = view(range, range.grad, range.grad_dtype, numel);
    at::Tensor wide = at::empty({numel}, own.options().dtype(at::kFloat));
    if (scale == 1.0F) {
      wide.copy_(own);
    } else {
      // With one dimension, the factor makes the product fp32.
      if (!factor->defined()) *factor = at::full({1}, scale, wide.options());
      at::mul_out(wide, own, *factor);
    }
    for (int64_t begin = 0; begin < numel;) {
      const int64_t count = runs[gradients.size()].range.numel;
      gradients.push_back(wide.narrow(0, begin, count));
      begin += count;
    }
  });
  return gradients;
}

void publish(const std::vector<StepRun>& runs) {
  const auto adjoin = [](const Range& first, int64_t numel, const Range& next) {
    return first.param_dtype == next.param_dtype &&
           after(first.param_out, first.param_dtype, numel) == next.param_out &&
           first.master + numel == next.master;
  };
  for_each_sequence(runs, adjoin, [](const Range& range, int64_t numel) {
    if (range.param_out == nullptr) return;
    view(range, range.param_out, range.param_dtype, numel)
        .copy_(view(range, range.master, Dtype::kFp32, numel));
  });
}

// Makes the step of all runs that the plugin can update, and returns the others.
std::vector<StepRun> without_fused(const std::vector<OptimizerConfig>& groups,
                                   const std::vector<StepRun>& runs, float grad_scale) {
  std::vector<StepRun> others;
  for (const auto& [key, alike] : by_group_and_step(runs)) {
    const StepRun& first = alike.front();
    if (first.usual() && run_fused(groups[first.group], alike, {grad_scale}, first.step)) continue;
    others.insert(others.end(), alike.begin(), alike.end());
  }
  return others.size() == runs.size() ? runs : others;
}

void step_together(const std::vector<OptimizerConfig>& groups, const std::vector<StepRun>& runs,
                   float grad_scale, StepScalars* scalars) {
  const std::vector<at::Tensor> gradients = wide_gradients(runs, grad_scale, &scalars->scale);
  std::map<GroupAndStep, DeviceUpdates> alike;
  for (size_t i = 0; i < runs.size(); ++i) {
    const StepRun& run = runs[i];
    const Range& range = run.range;
    alike[key_of(run)].push_back(
        {groups[run.group], run, view(range, range.master, Dtype::kFp32, range.numel), gradients[i],
         view(range, run.moment1, range.moment_dtype, range.numel),
         view(range, run.moment2, range.moment_dtype, range.numel)});
  }
  for (auto& [key, updates] : alike) step_alike(updates, scalars);
  publish(runs);
}

// Removes the first `count` values from the run and returns them as a run.
StepRun take_first(StepRun& run, int64_t count) {
  StepRun first = run;
  first.range.numel = count;
  Range& rest = run.range;
  rest.numel -= count;
  rest.master += count;
  rest.grad = after(rest.grad, rest.grad_dtype, count);
  rest.param_out = after(rest.param_out, rest.param_dtype, count);
  run.moment1 = after(run.moment1, rest.moment_dtype, count);
  run.moment2 = after(run.moment2, rest.moment_dtype, count);
  return first;
}

}  // namespace

void run_on_device(const std::vector<OptimizerConfig>& groups, const std::vector<StepRun>& runs,
                   float grad_scale, StepScalars* scalars) {
  const device::Unseen unseen;
  std::vector<StepRun> together;
  int64_t room = kTogether;
  for (StepRun run : without_fused(groups, runs, grad_scale)) {
    while (run.range.numel > 0) {
      together.push_back(take_first(run, std::min(room, run.range.numel)));
      room -= together.back().range.numel;
      if (room > 0) continue;
      step_together(groups, together, grad_scale, scalars);
      together.clear();
      room = kTogether;
    }
  }
  if (!together.empty()) step_together(groups, together, grad_scale, scalars);
}

}  // namespace penstock::optim
