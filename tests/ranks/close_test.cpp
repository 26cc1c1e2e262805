// The end of an engine: tensors that the user keeps after it stay valid memory (the sanitizers
// check this), and weights are restored after a failure on one rank.
#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>

#include "penstock/engine.h"
#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/model/values.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::close_test {
namespace {

constexpr std::chrono::seconds kTimeout{60};

Config config_of(const char* strategy) {
  return Config::parse(concat(R"({"strategy": ")", strategy,
                              R"(", "optimizer": {"type": "SGD", "lr": 0.1},)",
                              R"( "units": {"modules": ["Block"]}})"));
}

// Call from one thread at a time, because build() seeds torch's generator.
std::vector<std::shared_ptr<ranks::NetImpl>> nets(int world) {
  std::vector<std::shared_ptr<ranks::NetImpl>> all;
  for (int rank = 0; rank < world; ++rank) all.push_back(ranks::build());
  return all;
}

void train(Engine& engine, ranks::NetImpl& net, int step, int rank, int world) {
  engine.backward(engine.run([&] { return ranks::loss_of(net, {step, 0, rank, 1, world}); }));
  engine.step();
}

// Returns the error text of a read, or "".
std::string error_of_read(const at::Tensor& values) {
  try {
    values.sum();
    return "";
  } catch (const c10::Error& error) {
    return error.what();
  }
}

struct End {
  const char *strategy, *how;
};

class Views : public testing::TestWithParam<End> {};

TEST_P(Views, OutliveTheEngine) {
  const auto [strategy, how] = GetParam();
  const bool gathers = std::string(how) == "gathers";
  const auto all = nets(2);
  const auto errors = ranks::run_ranks(2, kTimeout, [&](int rank, const auto& group) {
    ranks::NetImpl& net = *all[rank];
    std::optional<Engine> engine(std::in_place, all[rank], config_of(strategy), group);
    at::Tensor& weight = net.blocks[1]->as<ranks::Block>()->inner->weight;
    const at::Tensor detached = weight.detach(), row = weight.data()[3];
    train(*engine, net, 0, rank, 2);
    at::Tensor expected;
    for (const auto& [name, value] : engine->state()) {
      if (name == "blocks.1.inner.weight") expected = value;
    }
    if (std::string(how) != "ends") engine->close(gathers);
    engine.reset();
    if (!gathers && std::string(strategy) == "zero3") {
      for (const at::Tensor& view : {detached, row}) {
        EXPECT_NE(error_of_read(view).find("its engine was closed without"), std::string::npos)
            << error_of_read(view);
      }
      return;
    }
    EXPECT_TRUE(detached.equal(expected));
    EXPECT_TRUE(row.equal(expected[3]));
    EXPECT_EQ(weight.storage().data(), detached.storage().data());
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}
INSTANTIATE_TEST_SUITE_P(Ends, Views,
                         testing::Values(End{"zero3", "gathers"}, End{"zero3", "drops"},
                                         End{"zero3", "ends"}, End{"zero2", "gathers"},
                                         End{"zero2", "drops"}, End{"ddp", "ends"}),
                         [](const auto& info) {
                           return concat(info.param.strategy, "_", info.param.how);
                         });

TEST(Start, ThatIsRefusedLeavesTheModelAsItWas) {
  const auto all = nets(2);
  const auto errors = ranks::run_ranks(2, kTimeout, [&](int rank, const auto& group) {
    const at::Tensor before = all[rank]->embed.detach().clone();
    const Config config = Config::parse(
        R"({"units": {"modules": ["Block"]}, "activations": {"checkpoint": "unit"}})");
    EXPECT_THROW(Engine(all[rank], config, group), ConfigError);
    EXPECT_TRUE(all[rank]->embed.equal(before));
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST(Shards, RaiseWhenTheEngineHasClosed) {
  const auto all = nets(1);
  const auto group = Group::alone();
  ModelTree tree;
  tree.modules.push_back({"", "Linear", -1, {0}});
  tree.params.push_back({"weight", torch::ones({8}).requires_grad_(), 0});
  Core core(tree, Config::parse(R"({"strategy": "zero1"})"), group, true);
  const std::vector<Shard> shards = Values(core).shards();
  EXPECT_EQ(shards.front().master.sum().item<float>(), 8.0F);
  core.close(true);
  EXPECT_THROW(shards.front().master.sum(), c10::Error);
}

class Failures : public testing::TestWithParam<const char*> {};

TEST_P(Failures, OnOneRankGiveTheWeightsBackOnAll) {
  const auto all = nets(2);
  const auto errors = ranks::run_ranks(2, kTimeout, [&](int rank, const auto& group) {
    ranks::NetImpl& net = *all[rank];
    Engine engine(all[rank], config_of(GetParam()), group);
    train(engine, net, 0, rank, 2);
    const auto before = engine.state();
    const auto run_block = net.run_block;
    if (rank == 1) {
      net.run_block = [&](int i, const torch::Tensor& x) {
        if (i == 1) throw std::runtime_error("no block today");
        return run_block(i, x);
      };
    }
    try {
      train(engine, net, 1, rank, 2);
      ADD_FAILURE() << "rank " << rank << " trains";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("no block today"), std::string::npos)
          << error.what();
    }
    engine.close();
    net.run_block = run_block;
    const auto params = net.named_parameters();
    for (const auto& [name, value] : before) EXPECT_TRUE(params[name].equal(value)) << name;
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}
INSTANTIATE_TEST_SUITE_P(Strategies, Failures, testing::Values("zero3", "hpz"));

TEST(Failures, ARankThatDoesNotComeIsNamedAndTheWeightsAreGone) {
  const auto all = nets(2);
  const auto errors = ranks::run_ranks(2, kTimeout, [&](int rank, const auto& group) {
    Engine engine(all[rank], config_of("zero3"), group);
    train(engine, *all[rank], 0, rank, 2);
    if (rank == 1) return engine.close(false);
    EXPECT_THROW(engine.close(), RuntimeFault);
    EXPECT_THROW(all[rank]->embed.sum(), c10::Error);
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace penstock::close_test
