// Compares optimizer state in chunks, parameter groups, each optimizer and buffers with plain
// torch, with ranks as threads. Weights are large enough for several chunks. Those of one flat
// differ in their group and in whether they are used. The C++ front has one group, so this drives
// the core as a front does.
#include <gtest/gtest.h>
#include <torch/optim.h>
#include <torch/types.h>

#include <cmath>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "penstock/config.h"
#include "penstock/core.h"
#include "src/base/text.h"
#include "src/engine/model/values.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::chunks_test {
namespace {

constexpr int64_t kWidth = 64;  // a square weight then has two chunks, the smallest number
constexpr int64_t kRows = 4;    // rows of a rank's batch
constexpr int kSteps = 4;
constexpr int kNumWeights = 5;  // the last one belongs to the block, the others to the root
constexpr int kUnused = 1, kOfGroup1 = 3;
constexpr int kOverflow = 1;               // the step that overflows in fp16 and is then skipped
constexpr double kRates[] = {0.01, 0.03};  // by group

struct Case {
  const char* name;
  const char* strategy;
  int world;
  const char* precision;
  const char* offload;  // keys and values
  const char* optimizer = R"("type": "AdamW", "eps": 1e-4, "weight_decay": 0.1)";
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

Config config_of(const Case& c) {
  std::string offload = c.offload;
  if (offload.find("disk") != std::string::npos)
    offload += concat(R"(, "window_bytes": 1, "path": ")", testing::TempDir(), "\"");
  return Config::parse(concat(R"({"strategy": ")", c.strategy, R"(", "precision": ")", c.precision,
                              R"(", "optimizer": {"lr": 0.01, )", c.optimizer,
                              R"(}, "units": {"modules": ["Block"]}, "offload": {)", offload,
                              "}}"));
}

struct Net {
  std::vector<torch::Tensor> weights;
  torch::Tensor buffer;  // fp32 in every precision; must not be rounded

  Net() {
    torch::Generator generator = at::detail::createCPUGenerator(1);  // ranks call this in parallel
    for (int i = 0; i < kNumWeights; ++i)
      weights.push_back((torch::randn({kWidth, kWidth}, generator) * 0.1).requires_grad_());
    buffer = torch::randn({kWidth}, generator);
  }

  static std::string name_of(int weight) {
    return weight + 1 < kNumWeights ? concat("w", weight) : "block.weight";
  }
  static int group_of(int weight) { return weight == kOfGroup1 ? 1 : 0; }

  ModelTree tree() const {
    ModelTree tree;
    tree.modules = {{"", "Net", -1, {0, 1, 2, 3}}, {"block", "Block", 0, {kNumWeights - 1}}};
    for (int i = 0; i < kNumWeights; ++i)
      tree.params.push_back({name_of(i), weights[i], group_of(i)});
    tree.buffers = {{"buffer", buffer}};
    return tree;
  }

  torch::Tensor layer(const torch::Tensor& x, int weight) const {
    return x + torch::tanh(x.matmul(weights[weight]));
  }
  // Computes the layers before the block.
  torch::Tensor root(const torch::Tensor& rows) const {
    torch::Tensor x = (rows + buffer).to(weights[0].scalar_type());
    for (int i = 0; i + 1 < kNumWeights; ++i)
      if (i != kUnused) x = layer(x, i);
    return x;
  }
  torch::Tensor block(const torch::Tensor& x) const { return layer(x, kNumWeights - 1); }
};

bool overflows(const Case& c, int step) {
  return step == kOverflow && std::string(c.precision) == "fp16";
}

// Returns the inputs and targets of `count` ranks, beginning with rank `first`.
torch::Tensor rows_of(const Case& c, int step, int first, int count) {
  torch::Generator generator = at::detail::createCPUGenerator(100 + step);
  const torch::Tensor all = torch::randn({2, c.world * kRows, kWidth}, generator);
  return all.narrow(1, first * kRows, count * kRows).mul(overflows(c, step) ? 1e6 : 1.0);
}

torch::Tensor loss_of(const torch::Tensor& out, const torch::Tensor& targets) {
  return (out.to(torch::kFloat) - targets).square().mean();
}

std::unique_ptr<torch::optim::Optimizer> plain_optimizer(const Case& c, const Net& net) {
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  const bool sgd = std::string(c.optimizer).find("SGD") != std::string::npos;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const int group : {0, 1}) {
    std::vector<torch::Tensor> members;
    for (int i = 0; i < kNumWeights; ++i)
      if (Net::group_of(i) == group) members.push_back(net.weights[i]);
    groups.emplace_back(std::move(members));
    if (sgd) {
      groups.back().set_options(
          std::make_unique<SGDOptions>(SGDOptions(kRates[group]).momentum(0.9)));
    } else {
      groups.back().set_options(
          std::make_unique<AdamWOptions>(AdamWOptions(kRates[group]).eps(1e-4).weight_decay(0.1)));
    }
  }
  if (sgd) return std::make_unique<torch::optim::SGD>(groups, SGDOptions(0.01));
  return std::make_unique<torch::optim::AdamW>(groups, AdamWOptions());
}

Net train_plainly(const Case& c) {
  Net net;
  const auto optimizer = plain_optimizer(c, net);
  for (int step = 0; step < kSteps; ++step) {
    if (overflows(c, step)) continue;
    optimizer->zero_grad();
    const torch::Tensor rows = rows_of(c, step, 0, c.world);
    loss_of(net.block(net.root(rows[0])), rows[1]).backward();
    optimizer->step();
  }
  return net;
}

void train(const Case& c, const Net& net, Core& core, int rank) {
  std::vector<OptimizerConfig> groups(2, *config_of(c).optimizer);
  for (const int group : {0, 1}) groups[group].lr = kRates[group];
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor rows = rows_of(c, step, rank, 1);
    core.unit_begin(0, true);
    const torch::Tensor x = net.root(rows[0]);
    core.unit_begin(1, true);
    const torch::Tensor out = net.block(x);
    core.unit_end(1, {out});
    const torch::Tensor loss = loss_of(out, rows[1]);
    core.unit_end(0, {loss});
    loss.backward(core.start_backward(loss));
    EXPECT_EQ(core.step(groups), !overflows(c, step));
  }
}

// Returns the L2 distance of the masters from those of plain torch, relative to the distance that
// the latter moved in training.
double deviation(const std::vector<std::pair<std::string, torch::Tensor>>& masters,
                 const Net& expected) {
  const torch::NoGradGuard no_grad;
  const Net start;
  double apart = 0, way = 0;
  for (const auto& [name, value] : masters) {
    for (int i = 0; i < kNumWeights; ++i) {
      if (Net::name_of(i) != name) continue;
      apart += (value - expected.weights[i]).square().sum().item<double>();
      way += (start.weights[i] - expected.weights[i]).square().sum().item<double>();
    }
  }
  return std::sqrt(apart / way);
}

class Chunks : public testing::TestWithParam<Case> {};

TEST_P(Chunks, TrainLikePlainTorch) {
  const Case c = GetParam();
  const Net expected = train_plainly(c);
  const double limit = std::string(c.precision) == "fp32" ? 1e-4 : 0.1;
  const auto errors =
      ranks::run_ranks(c.world, std::chrono::seconds(60), [&](int rank, const auto& group) {
        const Net net;
        Core core(net.tree(), config_of(c), group);
        train(c, net, core, rank);
        const double apart = deviation(Values(core).full("param"), expected);
        EXPECT_LT(apart, limit) << "on rank " << rank;
        EXPECT_TRUE(net.buffer.equal(expected.buffer)) << "on rank " << rank;
        core.close(true);
      });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

constexpr const char* kSgd = R"("type": "SGD", "momentum": 0.9)";
constexpr const char* kStateOnDisk = R"("optimizer": "disk")";
constexpr const char* kParamsToo = R"("optimizer": "disk", "params": "disk")";
constexpr const char* kAllOnDisk = R"("optimizer": "disk", "params": "disk", "gradients": "disk")";
constexpr Case kCases[] = {
    {"memory", "ddp", 2, "fp32", ""},
    {"memory_bf16", "zero3", 2, "bf16", ""},
    {"memory_sgd", "zero2", 2, "fp32", "", kSgd},
    {"state", "ddp", 1, "fp32", kStateOnDisk},
    {"state_sharded", "zero1", 2, "fp32", kStateOnDisk},
    {"state_bf16", "zero1", 2, "bf16", kStateOnDisk},
    {"state_fp16", "zero1", 2, "fp16", kStateOnDisk},
    {"state_sgd", "zero1", 2, "fp32", kStateOnDisk, kSgd},
    {"params", "zero3", 2, "fp32", kParamsToo},
    {"params_bf16", "zero3", 1, "bf16", kParamsToo},
    {"params_fp16", "zero3", 2, "fp16", kParamsToo},
    {"gradients", "zero3", 2, "fp32", kAllOnDisk},
    {"gradients_bf16", "zero3", 2, "bf16", kAllOnDisk},
    {"gradients_fp16", "zero3", 2, "fp16", kAllOnDisk},
    {"gradients_late", "zero3", 2, "fp32",
     R"("late_update": true, "optimizer": "disk", "params": "disk", "gradients": "disk")"},
};
INSTANTIATE_TEST_SUITE_P(Cases, Chunks, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace penstock::chunks_test
