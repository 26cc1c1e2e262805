#include "src/engine/mesh/stage_split.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "penstock/error.h"

namespace penstock::engine {
namespace {

// A model with an embedding, four blocks, a small norm and a head. The root has its own parameter.
ModelTree chain(bool tied) {
  ModelTree tree;
  const auto param = [&tree](const std::string& name, int64_t numel) {
    tree.params.push_back({name, at::zeros({numel}), 0});
    return static_cast<int>(tree.params.size()) - 1;
  };
  const int own = param("own", 4), tokens = param("tokens", 4000);
  tree.modules = {{"", "Chain", -1, {own}},
                  {"tokens", "Embedding", 0, {tokens}},
                  {"blocks", "ModuleList", 0, {}}};
  for (const char* name : {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}) {
    const auto at = static_cast<int>(tree.modules.size());
    tree.modules.push_back({name, "Block", 2, {}});
    tree.modules.push_back({std::string(name) + ".fc", "Linear", at, {param(name, 1000)}});
  }
  tree.modules.push_back({"norm", "LayerNorm", 0, {param("norm", 8)}});
  tree.modules.push_back({"head", "Linear", 0, {tied ? tokens : param("head", 900)}});
  return tree;
}

Stages found(const ModelTree& tree, int ranks, const std::vector<std::string>& begins = {}) {
  Config config;
  config.mesh.pipeline = ranks;
  config.parallel.stages = begins;
  config.units.layer_bytes = 1000;
  return find_stages(tree, find_units(tree, Stages::units(config.units)), config);
}

std::vector<int> stages_of(const Stages& stages) {
  std::vector<int> all;
  for (const StageModule& piece : stages.pieces) all.push_back(piece.stage);
  return all;
}

std::string refusal(const std::vector<std::string>& begins, int ranks = 3) {
  try {
    found(chain(false), ranks, begins);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Stages, HaveEqualWorkWhereAnEmbeddingHasNone) {
  const Stages stages = found(chain(false), 2);
  ASSERT_EQ(stages.pieces.size(), 6U);  // the norm is small
  EXPECT_EQ(stages.pieces.front(), (StageModule{"tokens", 0}));
  EXPECT_EQ(stages_of(stages), (std::vector<int>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(stages_of(found(chain(false), 5)), (std::vector<int>{0, 0, 1, 2, 3, 4}));
}

TEST(Stages, WhatIsSmallOrOfWhatEnclosesOthersIsOnAllOfThem) {
  const Stages stages = found(chain(false), 3);
  const ModelTree tree = chain(false);
  for (size_t p = 0; p < tree.params.size(); ++p) {
    const std::string& name = tree.params[p].name;
    const bool everywhere = name == "own" || name == "norm";
    EXPECT_EQ(stages.of_param[p].size(), everywhere ? 3U : 1U) << name;
  }
}

TEST(Stages, TiedWeightsAreOnTheFirstAndTheLast) {
  const Stages stages = found(chain(true), 3);
  EXPECT_EQ(stages.pieces.back(), (StageModule{"head", 2}));
  EXPECT_EQ(stages.of_param[1], (std::vector<int>{0, 2}));
}

TEST(Stages, AsNamed) {
  EXPECT_EQ(stages_of(found(chain(false), 2, {"blocks.3"})), (std::vector<int>{0, 0, 0, 0, 1, 1}));
  // The name of a module that encloses pieces means its first piece.
  EXPECT_EQ(stages_of(found(chain(false), 2, {"blocks"})), (std::vector<int>{0, 1, 1, 1, 1, 1}));
}

TEST(Stages, AreRefused) {
  EXPECT_NE(refusal({"blocks.1"}).find("names 1 modules"), std::string::npos);
  EXPECT_NE(refusal({"blocks.2", "blocks.1"}).find("does not come after"), std::string::npos);
  EXPECT_NE(refusal({"tokens", "blocks.1"}).find("does not come after"), std::string::npos);
  EXPECT_NE(refusal({"block.1", "blocks.2"}).find("did you mean \"blocks.1\""), std::string::npos);
  EXPECT_NE(refusal({}, 7).find("too few modules"), std::string::npos);
}

}  // namespace
}  // namespace penstock::engine
