#include "src/engine/model/adoption.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <memory>
#include <optional>
#include <thread>

#include "penstock/engine.h"
#include "penstock/error.h"
#include "src/engine/model/blueprint.h"

namespace penstock::engine {
namespace {

// One rank's side of a model of two units, ready to be adopted.
struct Rank {
  Rank(const std::string& json, const std::shared_ptr<Group>& ranks)
      : config(Config::parse(json)), group(ranks) {
    config.resolve(group->size());
    tree.modules = {{"", "Net", -1, {0}}, {"b", "Linear", 0, {1}}};
    for (const char* name : {"a", "b"}) {
      tree.params.push_back({name, at::arange(6, at::kFloat).add(group->rank()).requires_grad_()});
    }
    tree.buffers.push_back({"kept", at::arange(4, at::kFloat).add(group->rank())});
    tree.buffers.push_back({"follows", at::arange(4, at::kFloat).add(group->rank()), 1});
    tree.buffers.push_back({"ruled", at::arange(4, at::kFloat).add(group->rank()), 1});
    Blueprint blueprint = draw(tree, config);
    const Table table = settle(blueprint);
    model = blueprint.model;
    executor.emplace(table, blueprint.mesh, *group, tiers, std::move(blueprint.units));
  }
  ~Rank() {
    for (exec::UnitState& unit : executor->units()) {
      for (exec::Flat& flat : unit.flats) flat.detach();
    }
    tiers.close_disk();
  }

  float sum(int param) const { return at::sum(tree.params[param].param.detach()).item<float>(); }

  Config config;
  std::shared_ptr<Group> group;
  ModelTree tree;
  ModelDesc model;
  mem::Tiers tiers;
  std::optional<exec::Executor> executor;
};

// Runs each rank on its own thread. Returns the error text of each rank, or "".
template <class Work>
std::array<std::string, 2> on_two_ranks(const Work& work) {
  const std::vector<std::shared_ptr<Group>> groups =
      Group::threads(2, std::chrono::milliseconds(20000));
  std::array<std::string, 2> errors;
  std::vector<std::thread> threads;
  for (const std::shared_ptr<Group>& group : groups) {
    threads.emplace_back([&, group] {
      try {
        work(group);
      } catch (const std::exception& error) {
        errors[group->rank()] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(Adoption, WhatIsNotCommittedLetsTheModelGo) {
  Rank rank(R"({"strategy": "zero1", "offload": {"optimizer": "disk"}})", Group::alone());
  {
    Adoption adoption(*rank.executor, rank.tiers);
    adoption.claim(rank.tree, rank.config, rank.model, false);
    adoption.take(rank.tree, rank.config, {});
    EXPECT_FLOAT_EQ(rank.sum(1), 15.0F);
    EXPECT_TRUE(rank.tiers.disk.has_value());
  }
  EXPECT_FALSE(rank.tiers.disk.has_value());
  try {
    rank.sum(1);
    FAIL() << "memory that is about to be freed was read";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("\"b\""), std::string::npos);
  }
}

TEST(Adoption, BeforeAnythingIsTakenTheModelKeepsItsOwnMemory) {
  Rank rank(R"({"strategy": "ddp"})", Group::alone());
  {
    Adoption adoption(*rank.executor, rank.tiers);
    adoption.claim(rank.tree, rank.config, rank.model, false);
  }
  EXPECT_FLOAT_EQ(rank.sum(0), 15.0F);
}

TEST(Adoption, WhatIsCommittedHasTheValuesOfRankZeroEverywhere) {
  const auto errors = on_two_ranks([](const std::shared_ptr<Group>& group) {
    Rank rank(R"({"strategy": "zero1"})", group);
    {
      Adoption adoption(*rank.executor, rank.tiers);
      adoption.claim(rank.tree, rank.config, rank.model, false);
      adoption.take(rank.tree, rank.config, {});
      adoption.commit();
    }
    EXPECT_FLOAT_EQ(rank.sum(0), 15.0F);
    EXPECT_FLOAT_EQ(at::sum(rank.tree.buffers[0].buffer).item<float>(), 6.0F);
  });
  EXPECT_EQ(errors, (std::array<std::string, 2>{}));
}

TEST(Adoption, CastsBuffersUntilItIsUndone) {
  Rank rank(R"({"strategy": "zero1", "precision": "bf16", "dtypes": {"rul*": "fp16"}})",
            Group::alone());
  const at::ScalarType expected[] = {at::kFloat, at::kBFloat16, at::kHalf};
  {
    Adoption adoption(*rank.executor, rank.tiers);
    adoption.claim(rank.tree, rank.config, rank.model, false);
    adoption.take(rank.tree, rank.config, {});
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(rank.tree.buffers[i].buffer.scalar_type(), expected[i]);
      EXPECT_FLOAT_EQ(at::sum(rank.tree.buffers[i].buffer).item<float>(), 6.0F);
    }
  }
  for (const BufferInfo& info : rank.tree.buffers) {
    EXPECT_EQ(info.buffer.scalar_type(), at::kFloat);
  }
}

TEST(Adoption, StatisticsOfTheCppFrontHaveTheDtypeOfTheirWeight) {
  const torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  Engine engine(model.ptr(), Config::parse(R"({"precision": "bf16"})"), Group::alone());
  for (const auto& item : model->named_buffers()) {
    const bool counts = item.key() == "1.num_batches_tracked";
    EXPECT_EQ(item.value().scalar_type(), counts ? at::kLong : at::kBFloat16) << item.key();
  }
  engine.close();
}

TEST(Adoption, ARankWithoutRoomEndsAllOfThem) {
  const auto errors = on_two_ranks([](const std::shared_ptr<Group>& group) {
    Rank rank(R"({"strategy": "zero1", "optimizer": {"type": "AdamW", "lr": 0.1,
                                                     "moments_dtype": "bf16"}})",
              group);
    Adoption adoption(*rank.executor, rank.tiers);
    adoption.claim(rank.tree, rank.config, rank.model, /*external_optimizer=*/group->rank() == 1);
  });
  EXPECT_NE(errors[1].find("an optimizer of your own"), std::string::npos) << errors[1];
  EXPECT_NE(errors[0].find("rank 1 failed with: "), std::string::npos) << errors[0];
}

}  // namespace
}  // namespace penstock::engine
