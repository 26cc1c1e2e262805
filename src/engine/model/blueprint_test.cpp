#include "src/engine/model/blueprint.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {
namespace {

// A root with its own parameter and two blocks of 64 x 64.
ModelTree blocks() {
  ModelTree tree;
  tree.modules = {{"", "Net", -1, {0}}};
  tree.params.push_back({"head", at::ones({4}).requires_grad_()});
  for (int i = 0; i < 2; ++i) {
    const std::string name = concat("blocks.", i), child = name + ".fc";
    const auto block = static_cast<int>(tree.modules.size());
    const auto param = static_cast<int>(tree.params.size());
    tree.modules.push_back({name, "Block", 0, {}});
    tree.modules.push_back({child, "Linear", block, {param}});
    tree.params.push_back({child + ".weight", at::ones({64, 64}).requires_grad_()});
  }
  return tree;
}

Blueprint drawn(const ModelTree& tree, const std::string& json, int world_size = 2) {
  Config config = Config::parse(json);
  config.resolve(world_size);
  return draw(tree, config);
}

TEST(Blueprint, IsDrawnWithoutMovingAnything) {
  const ModelTree tree = blocks();
  const Blueprint blueprint = drawn(tree, R"({"strategy": "zero3", "precision": "bf16"})");
  ASSERT_EQ(blueprint.units.size(), 3U);
  EXPECT_EQ(blueprint.units[2].name, "blocks.1");
  EXPECT_EQ(blueprint.mesh.world(), 2);
  EXPECT_EQ(blueprint.model.units[1].flats, (std::vector<FlatDesc>{{4096, Dtype::kBf16, true}}));
  EXPECT_EQ(tree.params[1].param.scalar_type(), at::kFloat);
  EXPECT_FLOAT_EQ(at::sum(tree.params[1].param).item<float>(), 4096.0F);
  EXPECT_EQ(fingerprint(blueprint.units),
            "parameter \"head\" [4] bf16 in unit the root\n"
            "parameter \"blocks.0.fc.weight\" [64, 64] bf16 in unit blocks.0\n"
            "parameter \"blocks.1.fc.weight\" [64, 64] bf16 in unit blocks.1\n");
}

TEST(Blueprint, ForeseesWhichUnitsAreComputedAgain) {
  Blueprint blueprint =
      drawn(blocks(), R"({"strategy": "zero3", "activations": {"checkpoint": 2}})");
  EXPECT_FALSE(blueprint.model.units[1].recomputed);
  foresee(blueprint);
  EXPECT_TRUE(blueprint.model.units[1].recomputed);
  EXPECT_FALSE(blueprint.model.units[2].recomputed);
}

TEST(Blueprint, OpenTiersAreChosenByTheRoomAndWhatCannotFitIsRefused) {
  const std::string json = R"({"strategy": "zero3", "optimizer": {}, "offload": "auto"})";
  Blueprint roomy = drawn(blocks(), json);
  EXPECT_NE(choose_tiers(roomy, {}, false).find("offload chosen: optimizer \"none\""),
            std::string::npos);
  EXPECT_EQ(roomy.config.offload.optimizer, "none");
  Blueprint narrow = drawn(blocks(), json);
  choose_tiers(narrow, {.device = 96 << 10}, false);
  EXPECT_EQ(narrow.config.offload.optimizer, "host");
  Blueprint none = drawn(blocks(), json);
  EXPECT_THROW(choose_tiers(none, {.device = 1 << 10}, false), ConfigError);
  Blueprint closed = drawn(blocks(), R"({"strategy": "zero3", "optimizer": {}})");
  EXPECT_EQ(choose_tiers(closed, {}, false), "");
}

TEST(Blueprint, BudgetsAreTheRoomAndAdviseWhatTakesLess) {
  Blueprint blueprint = drawn(blocks(), R"({"strategy": "zero3", "optimizer": {}})");
  const Budgets budgets = budgets_of(blueprint, {.device = 1 << 20, .host = 1 << 30}, false);
  EXPECT_EQ(budgets.device.bytes, 1 << 20);
  EXPECT_EQ(budgets.memory.bytes, Room::kNoLimit);
  EXPECT_EQ(budgets.host.name, "free memory at initialize() (memory.host_bytes overrides it)");
  EXPECT_NE(budgets.device.advice().find("offload.gradients \"host\""), std::string::npos)
      << budgets.device.advice();
}

TEST(Blueprint, SettlingFixesTheTableAndTheChunks) {
  Blueprint blueprint = drawn(
      blocks(),
      R"({"strategy": "zero3", "optimizer": {}, "offload": {"optimizer": "disk", "window_bytes": 36864}})",
      1);
  const Table table = settle(blueprint);
  EXPECT_EQ(table.at(Role::kOptim, Phase::kRest).tier, Tier::kDisk);
  EXPECT_GT(blueprint.model.units[1].num_chunks, 1);
}

}  // namespace
}  // namespace penstock::engine
