// Compares units that are recomputed in backward with plain torch, with ranks as threads. The
// units' inputs wait in memory or on disk, alone or beside other state that moves. The C++ front
// cannot recompute units, so this drives the core as a front does.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim.h>
#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"
#include "penstock/error.h"
#include "src/base/text.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::recompute_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kWidth = 21, kRows = 64;  // an input is larger than a disk block
constexpr int kBlocks = 3, kSteps = 4;
// Unit 2 is used twice. The gradients of its first use come after those of the second have moved.
constexpr int kOrder[] = {1, 2, 3, 2};

// The first weight belongs to the root; each block has one of the others.
std::vector<torch::Tensor> weights() {
  torch::Generator generator = at::detail::createCPUGenerator(1);  // ranks call this in parallel
  std::vector<torch::Tensor> all;
  for (int i = 0; i <= kBlocks; ++i) {
    all.push_back((torch::randn({kWidth, kWidth}, generator) * 0.3).requires_grad_());
  }
  return all;
}

std::string name_of_weight(int i) { return i == 0 ? "embed" : concat("blocks.", i - 1, ".weight"); }

ModelTree tree_of(const std::vector<torch::Tensor>& weights) {
  ModelTree tree;
  for (int i = 0; i <= kBlocks; ++i) {
    const bool root = i == 0;
    tree.modules.push_back(
        {root ? "" : concat("blocks.", i - 1), root ? "Net" : "Block", root ? -1 : 0, {i}});
    tree.params.push_back({name_of_weight(i), weights[i]});
  }
  return tree;
}

torch::Tensor block(const torch::Tensor& x, const torch::Tensor& weight) {
  return x + torch::tanh(x.matmul(weight));
}

// The state of a unit that is recomputed in its backward.
struct Saved : torch::CustomClassHolder {
  Core* core = nullptr;
  int unit = 0;
  torch::Tensor weight;
  std::function<torch::Tensor()> input;
};

struct Again : torch::autograd::Function<Again> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const c10::intrusive_ptr<Saved>& saved) {
    saved->input = [x] { return x; };
    Recomputation recomputation(*saved->core);
    if (recomputation.moves_inputs()) saved->input = recomputation.save(saved->unit, x);
    context->saved_data["saved"] = c10::IValue::make_capsule(saved);
    return block(x, saved->weight);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& saved = static_cast<Saved&>(*context->saved_data["saved"].toCapsule());
    Recomputation(*saved.core).begin(saved.unit);
    const torch::Tensor x = std::exchange(saved.input, {})().detach().requires_grad_();
    const torch::AutoGradMode enabled(true);
    torch::autograd::backward({block(x, saved.weight)}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

torch::Tensor forward(Core& core, const std::vector<torch::Tensor>& weights,
                      const torch::Tensor& x) {
  core.unit_begin(0, true);
  torch::Tensor out = x.matmul(weights[0]);
  for (const int unit : kOrder) {
    core.unit_begin(unit, true);
    auto saved = c10::make_intrusive<Saved>();
    saved->core = &core;
    saved->unit = unit;
    saved->weight = weights[unit];
    out = Again::apply(out, saved);
    core.unit_end(unit, {out});
  }
  core.unit_end(0, {out});
  return out.square().mean();
}

torch::Tensor rows_of(int step, int first, int count, int world) {
  torch::Generator generator = at::detail::createCPUGenerator(step + 2);
  return torch::randn({kRows * world, kWidth}, generator).narrow(0, first * kRows, count * kRows);
}

std::vector<torch::Tensor> reference(int world) {
  std::vector<torch::Tensor> params = weights();
  torch::optim::AdamW optimizer(params,
                                torch::optim::AdamWOptions(0.01).eps(1e-4).weight_decay(0.1));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    torch::Tensor out = rows_of(step, 0, world, world).matmul(params[0]);
    for (const int i : kOrder) out = block(out, params[i]);
    out.square().mean().backward();
    optimizer.step();
  }
  // Detached, because ranks that compare with them at the same time would share autograd nodes.
  for (torch::Tensor& param : params) param = param.detach();
  return params;
}

struct Case {
  const char* strategy;
  int world;
  const char *name, *offload;
};

std::string name_of(const Case& c) { return concat(c.strategy, "_world", c.world, "_", c.name); }

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << name_of(c); }

Config config_of(const Case& c) {
  std::string offload = c.offload;
  if (offload.find("disk") != std::string::npos)
    offload += concat(R"(, "path": ")", testing::TempDir(), "\"");
  return Config::parse(concat(
      R"({"strategy": ")", c.strategy, R"(", "activations": {"checkpoint": "unit"}, "units": )",
      R"({"modules": ["Block"]}, "optimizer": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}, )",
      R"("comm": {"bucket_bytes": 1}, "offload": {)", offload, "}}"));
}

void train(const Case& c, int rank, const std::shared_ptr<Group>& group,
           const std::vector<torch::Tensor>& expected) {
  const Config config = config_of(c);
  const std::vector<torch::Tensor> params = weights();
  Core core(tree_of(params), config, group);
  const Recomputation recomputation(core);
  const std::vector<UnitInfo> units = core.units();
  ASSERT_EQ(
      std::count_if(units.begin(), units.end(), [](const UnitInfo& u) { return u.recomputed; }),
      kBlocks);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor loss = forward(core, params, rows_of(step, rank, 1, c.world));
    EXPECT_EQ(recomputation.saved_bytes() > 0, recomputation.moves_inputs());
    loss.backward(core.start_backward(loss));
    EXPECT_EQ(recomputation.saved_bytes(), 0);
    EXPECT_TRUE(core.step({*config.optimizer}));
  }
  core.close(true);
  for (int i = 0; i <= kBlocks; ++i) {
    EXPECT_LT((params[i].detach() - expected[i]).abs().max().item<double>(), 1e-5)
        << name_of_weight(i) << " on rank " << rank;
  }
}

class Recomputed : public testing::TestWithParam<Case> {};

TEST_P(Recomputed, TrainLikePlainTorch) {
  const Case c = GetParam();
  const auto expected = reference(c.world);
  const auto errors =
      ranks::run_ranks(c.world, std::chrono::seconds(60),
                       [&](int rank, const auto& group) { train(c, rank, group, expected); });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int world : {1, 2, 3}) {
    for (const char* strategy : {"zero1", "zero3"}) {
      all.push_back({strategy, world, "act_device", ""});
      all.push_back({strategy, world, "act_host", R"("activations": "host")"});
      all.push_back({strategy, world, "act_disk", R"("activations": "disk")"});
      all.push_back(
          {strategy, world, "act_optim_disk", R"("activations": "disk", "optimizer": "disk")"});
    }
    all.push_back({"zero3", world, "late_all_disk",
                   R"("activations": "disk", "optimizer": "disk", "params": "disk", )"
                   R"("gradients": "disk", "late_update": true)"});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Matrix, Recomputed, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace penstock::recompute_test
