// Compares the C++ engine with plain torch, with ranks as threads: every strategy, world sizes that
// divide the parameters evenly or not, both precisions, accumulation, every tier, late updates, and
// shared, frozen and unused parameters.
#include <gtest/gtest.h>
#include <torch/optim.h>

#include "penstock/engine.h"
#include "penstock/error.h"
#include "src/base/text.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::engine_test {
namespace {

using ranks::build;
using ranks::loss_of;
using ranks::NetImpl;
using ranks::run_ranks;

constexpr int kSteps = 4;
constexpr std::chrono::seconds kTimeout{60};

std::map<std::string, torch::Tensor> reference(int world, int accumulate, double clip) {
  auto net = build();
  std::vector<torch::Tensor> params;
  for (auto& p : net->parameters()) {
    if (p.requires_grad()) params.push_back(p);
  }
  torch::optim::AdamW optimizer(params,
                                torch::optim::AdamWOptions(0.01).eps(1e-4).weight_decay(0.1));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < accumulate; ++micro) {
      (loss_of(*net, {step, micro, 0, world, world}) / accumulate).backward();
    }
    torch::nn::utils::clip_grad_norm_(params, clip);
    optimizer.step();
  }
  std::map<std::string, torch::Tensor> state;
  for (const auto& item : net->named_parameters()) state[item.key()] = item.value().detach();
  return state;
}

struct Case {
  const char* strategy;
  int world;
  int accumulate;
  const char* precision;
  const char* tiers = "memory";
  const char* offload = "";  // keys and values
};

std::string name_of(const Case& c) {
  return concat(c.strategy, "_world", c.world, "_accumulate", c.accumulate, "_", c.precision, "_",
                c.tiers);
}

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << name_of(c); }

Config config_of(const Case& c) {
  std::string offload = c.offload;
  if (offload.find("disk") != std::string::npos)
    offload += concat(R"(, "path": ")", testing::TempDir(), "\"");
  return Config::parse(
      concat(R"({"strategy": ")", c.strategy, R"(", "precision": ")", c.precision,
             R"(", "clip": 0.5, "batch": {"accumulate": )", c.accumulate,
             R"(}, "optimizer": {"type": "AdamW", "lr": 0.01, "eps": 1e-4, "weight_decay": 0.1},)",
             R"( "units": {"modules": ["Block"]}, "comm": {"bucket_bytes": 1}, "mesh": {"node": )",
             c.world % 2 == 0 ? 2 : 1, R"(}, "offload": {)", offload, "}}"));
}

double apart(const torch::Tensor& a, const torch::Tensor& b) {
  return (a.detach().to(torch::kFloat) - b.detach()).abs().max().item<double>();
}

class Engines : public testing::TestWithParam<Case> {};

TEST_P(Engines, TrainLikePlainTorch) {
  const Case c = GetParam();
  const Config config = config_of(c);
  const auto expected = reference(c.world, c.accumulate, 0.5);
  const double tolerance = std::string(c.precision) == "fp32" ? 1e-5 : 2e-2;
  std::vector<std::shared_ptr<NetImpl>> nets;
  for (int rank = 0; rank < c.world; ++rank) nets.push_back(build());
  const auto errors = run_ranks(c.world, kTimeout, [&](int rank, const auto& group) {
    Engine engine(nets[rank], config, group);
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < c.accumulate; ++micro) {
        engine.backward(
            engine.run([&] { return loss_of(*nets[rank], {step, micro, rank, 1, c.world}); }));
        EXPECT_EQ(engine.step(), micro + 1 == c.accumulate);
      }
    }
    for (const auto& [name, value] : engine.state()) {
      EXPECT_LT(apart(value, expected.at(name)), tolerance) << name << " on rank " << rank;
    }
    engine.close();
    EXPECT_LT(apart(nets[rank]->embed, expected.at("embed")), tolerance);
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

// Tests unfused moves, which are exchanges of their own, and fused moves, whose small buffers are
// packed together.
TEST(Engine, ExchangesAndTakesMemoryAsPredicted) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hpz", "hpz_host", "mics"}) {
    for (const char* bucket : {"1", "1048576"}) {
      const Config config = Config::parse(
          concat(R"({"strategy": ")", strategy, R"(", "precision": "bf16", "mesh": {"node": 2},)",
                 R"( "units": {"modules": ["Block"]}, "comm": {"bucket_bytes": )", bucket, "}}"));
      std::vector<std::shared_ptr<NetImpl>> nets;
      for (int rank = 0; rank < 4; ++rank) {
        NetImpl* net = nets.emplace_back(build()).get();
        // Calls each block once, because a second call is off plan.
        net->run_block = [net, calls = 0](int i, const torch::Tensor& x) mutable {
          return calls++ % 4 == 3 ? x : net->blocks[i]->as<ranks::Block>()->forward(x);
        };
      }
      const auto errors = run_ranks(4, kTimeout, [&](int rank, const auto& group) {
        Engine engine(nets[rank], config, group);
        for (int step = 0; step < 3; ++step) {
          engine.backward(engine.run([&] { return loss_of(*nets[rank], {step, 0, rank, 1, 4}); }));
          engine.step();
        }
        const LedgerReport ledger = engine.ledger();
        EXPECT_GT(ledger.measured.exchanges, 0);
        const LedgerEntry& predicted = ledger.predicted.at(strategy);
        EXPECT_EQ(ledger.measured.exchanges, predicted.exchanges) << strategy << " " << bucket;
        EXPECT_NEAR(ledger.measured.total, predicted.total, predicted.total / 10) << strategy;
        EXPECT_EQ(ledger.measured.buffers, predicted.buffers) << strategy << " " << bucket;
      });
      for (const auto& error : errors) EXPECT_EQ(error, "");
    }
  }
}

// A model with layers outside the blocks. If `tells`, these layers tell the engine when they run.
struct LayeredImpl : torch::nn::Module {
  explicit LayeredImpl(bool tells) : tells(tells) {
    enter = register_module("enter", torch::nn::Linear(ranks::kWidth, ranks::kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(ranks::Block());
    head = register_module("head", torch::nn::Linear(ranks::kWidth, 1));
    double end = 0.2;
    const torch::NoGradGuard guard;
    for (auto& p : parameters())  // the same in every copy
      p.copy_(torch::linspace(-0.2, end += 0.01, p.numel()).view_as(p));
  }

  torch::Tensor run(torch::nn::Linear& layer, const torch::Tensor& x) const {
    return tells ? unit(*layer, [&] { return layer(x); }) : layer(x);
  }

  torch::Tensor loss(int step, int rank, int world) {
    torch::Tensor rows = torch::linspace(-1, 1 + 0.1 * step, 2 * world * ranks::kWidth);
    torch::Tensor x = run(enter, rows.view({world, 2, ranks::kWidth})[rank]);
    for (const auto& block : *blocks) {
      x = unit(*block, [&] { return block->as<ranks::Block>()->forward(x); });
    }
    return run(head, x).square().mean();
  }

  bool tells;
  torch::nn::Linear enter{nullptr}, head{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};

class Layers : public testing::TestWithParam<std::tuple<const char*, int, bool>> {};

TEST_P(Layers, TrainLikePlainTorchAsUnits) {
  const auto [strategy, world, tells] = GetParam();
  LayeredImpl plain(false);
  torch::optim::SGD optimizer(plain.parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < world; ++rank) (plain.loss(step, rank, world) / world).backward();
    optimizer.step();
  }
  const auto expected = plain.named_parameters();
  const Config config = Config::parse(
      concat(R"({"strategy": ")", strategy, R"(", "units": {"layer_bytes": 1}, "mesh": {"node": )",
             world, R"(}, "optimizer": {"type": "SGD", "lr": 0.1}})"));
  const auto errors = run_ranks(world, kTimeout, [&, tells = tells](int rank, const auto& group) {
    const auto net = std::make_shared<LayeredImpl>(tells);
    Engine engine(net, config, group);
    EXPECT_NE(engine.explain().find("\nu4 head "), std::string::npos) << engine.explain();
    for (int step = 0; step < kSteps; ++step) {
      engine.backward(engine.run([&, world = world] { return net->loss(step, rank, world); }));
      engine.step();
    }
    for (const auto& [name, value] : engine.state()) {
      EXPECT_LT(apart(value, expected[name]), 1e-5) << name;
    }
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}
INSTANTIATE_TEST_SUITE_P(Told, Layers,
                         testing::Combine(testing::Values("zero2", "zero3", "hpz"),
                                          testing::Values(1, 2), testing::Bool()));

TEST(Engine, ForInferenceOnlyRunsForwards) {
  for (const char* strategy : {"ddp", "zero3"}) {
    const Config config = Config::parse(concat(R"({"inference": true, "strategy": ")", strategy,
                                               R"(", "units": {"modules": ["Block"]}})"));
    const torch::Tensor expected = loss_of(*build(), {0, 0, 0, 1, 1}).detach();
    std::vector<std::shared_ptr<NetImpl>> nets = {build(), build()};
    const auto trained = [](NetImpl& net) {
      const std::vector<torch::Tensor> params = net.parameters();
      return std::count_if(params.begin(), params.end(),
                           [](const torch::Tensor& one) { return one.requires_grad(); });
    };
    const auto before = trained(*nets[0]);
    const auto errors = run_ranks(2, kTimeout, [&](int rank, const auto& group) {
      Engine engine(nets[rank], config, group);
      EXPECT_EQ(trained(*nets[rank]), 0);
      for (int time = 0; time < 2; ++time) {
        const torch::Tensor loss =
            engine.run([&] { return loss_of(*nets[rank], {0, 0, 0, 1, 1}); });
        EXPECT_LT(apart(loss, expected), 1e-6);
        try {
          engine.backward(loss);
          ADD_FAILURE() << "no error";
        } catch (const RuntimeFault& error) {
          EXPECT_NE(std::string(error.what()).find("for inference"), std::string::npos);
        }
      }
      EXPECT_THROW(engine.step(), RuntimeFault);
      engine.close();
    });
    for (const auto& error : errors) EXPECT_EQ(error, "");
    EXPECT_EQ(trained(*nets[0]), before);
  }
}

TEST(Engine, RefusesToComputeUnitsAgain) {
  const Config config =
      Config::parse(R"({"activations": {"checkpoint": "unit"}, "units": {"modules": ["Block"]}})");
  try {
    const Engine engine(build(), config, Group::threads(1, std::chrono::seconds(60))[0]);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("activations.checkpoint"), std::string::npos);
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hpz", "hpz_host", "mics"}) {
    for (const int world : {1, 2, 3, 4, 7}) {
      for (const int accumulate : {1, 3}) {
        all.push_back({strategy, world, accumulate, "fp32"});
        if (world == 2) all.push_back({strategy, world, accumulate, "bf16"});
      }
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Matrix, Engines, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

struct Tiers {
  const char *name, *offload;
  std::vector<const char*> strategies;
};
const Tiers kTiers[] = {
    {"optim_host", R"("optimizer": "host")", {"ddp", "zero1", "zero2", "zero3"}},
    {"optim_disk", R"("optimizer": "disk")", {"ddp", "zero1", "zero2", "zero3"}},
    {"grad_host", R"("gradients": "host")", {"zero2", "zero3"}},
    {"grad_disk", R"("optimizer": "host", "gradients": "disk")", {"zero2", "zero3"}},
    {"param_disk", R"("params": "disk")", {"zero3"}},
    {"all_host", R"("optimizer": "host", "params": "host")", {"zero3", "hpz"}},
    {"optim_param_disk", R"("optimizer": "disk", "params": "disk")", {"zero3", "mics"}},
    {"all_disk",
     R"("optimizer": "disk", "params": "disk", "gradients": "disk", "checksums": true)",
     {"zero3", "mics"}},
    {"late_optim_host", R"("late_update": true, "optimizer": "host")", {"zero3", "hpz", "mics"}},
    {"late_all_host",
     R"("late_update": true, "optimizer": "host", "params": "host")",
     {"zero3", "hpz"}},
    {"late_optim_disk", R"("late_update": true, "optimizer": "disk")", {"zero3", "hpz"}},
    {"late_grad_disk",
     R"("late_update": true, "optimizer": "host", "gradients": "disk")",
     {"zero3", "mics"}},
    {"late_optim_param_disk",
     R"("late_update": true, "optimizer": "disk", "params": "disk")",
     {"zero3", "mics"}},
    {"late_all_disk",
     R"("late_update": true, "optimizer": "disk", "params": "disk", "gradients": "disk")",
     {"zero3", "mics"}},
};

std::vector<Case> offloaded_cases() {
  std::vector<Case> all;
  for (const Tiers& tiers : kTiers) {
    for (const char* strategy : tiers.strategies) {
      const bool by_node = std::string(strategy) == "hpz" || std::string(strategy) == "mics";
      for (const int world : by_node ? std::vector<int>{4} : std::vector<int>{1, 2, 3}) {
        for (const int accumulate : {1, 3}) {
          for (const char* precision : {"fp32", "bf16"}) {
            all.push_back({strategy, world, accumulate, precision, tiers.name, tiers.offload});
          }
        }
      }
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Offloaded, Engines, testing::ValuesIn(offloaded_cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace penstock::engine_test
