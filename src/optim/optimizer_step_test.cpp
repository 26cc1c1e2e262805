#include "src/optim/optimizer_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"

namespace penstock::optim {
namespace {

using enum OptimizerType;

constexpr double kGrad[] = {0.5, -0.125, 0.25};  // in three steps
constexpr float kScale = 0.5F;

// One value in double, with the formulas of the papers and of torch.optim.
struct Value {
  double p = 2.0, m = 0.0, v = 0.0;
};
using Formula = void (*)(const OptimizerConfig& o, double g, int step, Value& x);

void adam_moments(const OptimizerConfig& o, double g, int step, Value& x) {
  x.m = o.betas[0] * x.m + (1 - o.betas[0]) * g;
  x.v = o.betas[1] * x.v + (1 - o.betas[1]) * g * g;
  const double mean = x.m / (1 - std::pow(o.betas[0], step));
  const double square = x.v / (1 - std::pow(o.betas[1], step));
  x.p -= o.lr * mean / (std::sqrt(square) + o.eps);
}

const std::map<OptimizerType, Formula> kFormulas = {
    {kAdamW,
     [](const OptimizerConfig& o, double g, int step, Value& x) {
       x.p -= o.lr * o.weight_decay * x.p;
       adam_moments(o, g, step, x);
     }},
    {kAdam, [](const OptimizerConfig& o, double g, int step,
               Value& x) { adam_moments(o, g + o.weight_decay * x.p, step, x); }},
    {kSgd,
     [](const OptimizerConfig& o, double g, int step, Value& x) {
       g += o.weight_decay * x.p;
       x.m = step == 1 ? g : o.momentum * x.m + (1 - o.dampening) * g;
       x.p -= o.lr * (o.momentum == 0 ? g : o.nesterov ? g + o.momentum * x.m : x.m);
     }},
    {kAdagrad,
     [](const OptimizerConfig& o, double g, int step, Value& x) {
       g += o.weight_decay * x.p;
       x.m += g * g;
       x.p -= o.lr / (1 + (step - 1) * o.lr_decay) * g / (std::sqrt(x.m) + o.eps);
     }},
    {kLion, [](const OptimizerConfig& o, double g, int, Value& x) {
       const double mixed = o.betas[0] * x.m + (1 - o.betas[0]) * g;
       x.p -= o.lr * (std::copysign(1.0, mixed) + o.weight_decay * x.p);
       x.m = o.betas[1] * x.m + (1 - o.betas[1]) * g;
     }}};

void expect_as_written(const OptimizerConfig& group) {
  const std::string& name = kind_of(group.type).name;
  float master = 2.0F, moment1 = 0.0F, moment2 = 0.0F;
  Value value;
  for (int step = 1; step <= 3; ++step) {
    const auto grad = static_cast<float>(kGrad[step - 1]);
    Range range;
    range.master = &master;
    range.grad = &grad;
    range.numel = 1;
    run_optimizer({group},
                  {{range, num_moments(group) > 0 ? &moment1 : nullptr,
                    num_moments(group) > 1 ? &moment2 : nullptr, 0, step}},
                  kScale, nullptr);
    kFormulas.at(group.type)(group, kScale * kGrad[step - 1], step, value);
    EXPECT_NEAR(master, value.p, 1e-6) << name << ", step " << step;
  }
}

TEST(OptimizerStep, EachTypeRunsItsOwnFormula) {
  for (const OptimizerKind& kind : optimizer_kinds()) {
    ASSERT_TRUE(kFormulas.contains(kind.defaults.type)) << kind.name;
    expect_as_written(kind.defaults);
  }
}

// Every setting has a value of its own, so that a mix-up changes the result.
TEST(OptimizerStep, EverySettingArrives) {
  for (const OptimizerKind& kind : optimizer_kinds()) {
    OptimizerConfig group = kind.defaults;
    group.lr = 0.03;
    group.betas = {0.7, 0.6};
    group.eps = 0.02;
    group.weight_decay = 0.2;
    group.momentum = 0.8;
    group.dampening = 0.3;
    group.lr_decay = 0.4;
    expect_as_written(group);
    group.dampening = 0.0;
    group.nesterov = true;
    expect_as_written(group);
  }
}

TEST(OptimizerStep, MissingMomentsAreABug) {
  float master = 2.0F, moment = 0.0F;
  const float grad = 1.0F;
  Range range;
  range.master = &master;
  range.grad = &grad;
  range.numel = 1;
  const auto run = [&](const OptimizerConfig& group, float* moment1) {
    run_optimizer({group}, {{range, moment1}}, 1.0F, nullptr);
  };
  EXPECT_THROW(run({.type = kAdam}, &moment), Bug);
  EXPECT_THROW(run({.type = kSgd, .momentum = 0.9}, nullptr), Bug);
  range.moment_dtype = Dtype::kBf16;
  EXPECT_THROW(run({.type = kAdagrad}, &moment), Bug);
  EXPECT_EQ(master, 2.0F);
}

}  // namespace
}  // namespace penstock::optim
