#include "src/engine/model/units.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "penstock/error.h"

namespace penstock::engine {
namespace {

ModelTree gpt() {
  ModelTree tree;
  const auto param = [&tree](const char* name) {
    tree.params.push_back({name, at::zeros({4, 4}), 0});
    return static_cast<int>(tree.params.size()) - 1;
  };
  const int emb = param("emb"), a = param("b0.w"), b = param("b1.w"), shared = param("shared");
  tree.modules = {{"", "Gpt", -1, {}},
                  {"emb", "Embedding", 0, {emb}},
                  {"blocks", "ModuleList", 0, {}},
                  {"blocks.0", "Block", 2, {}},
                  {"blocks.0.fc", "Linear", 3, {a, shared}},
                  {"blocks.1", "Block", 2, {}},
                  {"blocks.1.fc", "Linear", 5, {b, shared}},
                  {"head", "Linear", 0, {emb}}};
  return tree;
}

TEST(FindUnits, RepeatedBlocksAreUnitsAndSharedParametersGoToTheRoot) {
  const auto units = find_units(gpt(), {});
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(units[0].params, (std::vector<int>{0, 3}));
  EXPECT_EQ(units[1].module, "blocks.0");
  EXPECT_EQ(units[1].params, (std::vector<int>{1}));
  EXPECT_EQ(units[2].params, (std::vector<int>{2}));
}

TEST(FindUnits, ByClassNameAndAWrongNameSuggestsTheNearest) {
  UnitsConfig config;
  config.modules = {"Block"};
  EXPECT_EQ(find_units(gpt(), config).size(), 3U);
  config.modules = {"Blok"};
  try {
    find_units(gpt(), config);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("\"Block\""), std::string::npos);
  }
}

TEST(FindUnits, BySizeWhereNothingRepeats) {
  ModelTree tree = gpt();
  tree.modules[5].type = "Other";
  EXPECT_EQ(find_units(tree, {}).size(), 1U);  // small: one unit, the root
  UnitsConfig config;
  config.max_bytes = 128;
  EXPECT_EQ(find_units(tree, config).size(), 3U);
}

// The model above with a head and a norm of its own; each parameter has 64 bytes.
ModelTree untied() {
  ModelTree tree = gpt();
  for (const char* name : {"head.weight", "norm.weight"}) {
    tree.params.push_back({name, at::zeros({name[0] == 'h' ? 8 : 1, 4}), 0});
  }
  tree.modules[7].params = {4};
  tree.modules.push_back({"out", "Out", 0, {}});
  tree.modules.push_back({"out.norm", "LayerNorm", 8, {5}});
  return tree;
}

std::vector<std::string> names(const std::vector<UnitSpec>& units) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : units) names.push_back(unit.module);
  return names;
}

using Names = std::vector<std::string>;

// Two parts of one class, each with a list of two modules of class `kind`, with layers nested
// inside.
ModelTree two_stacks(const char* kind, bool deep) {
  ModelTree tree;
  tree.modules = {{"", "Net", -1, {}}};
  const auto module = [&tree](std::string name, const char* type, int parent) {
    tree.modules.push_back({std::move(name), type, parent, {}});
    return static_cast<int>(tree.modules.size()) - 1;
  };
  for (const std::string stack : {"one", "two"}) {
    const int outer = module(stack, "Stack", 0);
    const int list = module(stack + ".list", "ModuleList", outer);
    for (const std::string place : {".0", ".1"}) {
      std::string name = stack + ".list" + place;
      int inner = module(name, kind, list);
      if (deep) inner = module(name += ".mix", "Mix", inner);
      const int layer = module(name += ".fc", "Linear", inner);
      tree.modules[layer].params = {static_cast<int>(tree.params.size())};
      tree.params.push_back({name + ".weight", at::zeros({4, 4}), 0});
    }
  }
  return tree;
}

TEST(FindUnits, AnEncoderAndADecoderOfOneClassAreStacksOfBlocks) {
  EXPECT_EQ(names(find_units(two_stacks("Block", true), {})),
            (Names{"", "one.list.0", "one.list.1", "two.list.0", "two.list.1"}));
}

TEST(FindUnits, ABlockWithAListOfExpertsIsABlock) {
  EXPECT_EQ(names(find_units(two_stacks("Expert", false), {})), (Names{"", "one", "two"}));
}

TEST(FindUnits, LargeLayersOutsideOfBlocksAreUnitsToo) {
  UnitsConfig config;
  config.layer_bytes = 64;
  EXPECT_EQ(names(find_units(untied(), config)),
            (Names{"", "emb", "blocks.0", "blocks.1", "head"}));
  config.layer_bytes = 65;
  EXPECT_EQ(names(find_units(untied(), config)), (Names{"", "blocks.0", "blocks.1", "head"}));
  config.layer_bytes = 1;
  config.modules = {"Block"};
  const auto units = find_units(untied(), config);
  EXPECT_EQ(names(units), (Names{"", "emb", "blocks.0", "blocks.1", "head", "out.norm"}));
  for (const UnitSpec& unit : units) {
    EXPECT_EQ(unit.block, unit.module.starts_with("blocks.")) << unit.module;
  }
}

TEST(FindUnits, WhatALayerSharesDoesNotMakeItAUnit) {
  UnitsConfig config;
  config.layer_bytes = 1;
  ModelTree tied = gpt();
  EXPECT_EQ(names(find_units(tied, config)), (Names{"", "blocks.0", "blocks.1"}));
  tied.params.push_back({"head.bias", at::zeros({1}), 0});
  tied.modules[7].params.push_back(4);
  EXPECT_EQ(find_units(tied, config)[3].params, std::vector<int>{4});
  config.layer_bytes = 5;
  EXPECT_EQ(find_units(tied, config).size(), 3U);
}

TEST(FindUnits, ALayerInTilesIsNoUnitBesides) {
  ModelTree tree = untied();
  tree.modules[7].rows = 4;
  tree.params.push_back({"head.bias", at::zeros({8}), 0});
  tree.modules[7].params = {6};
  tree.params.push_back({"head.weight[0:8]", at::zeros({8, 4}), 0, 4});
  tree.modules.push_back({"head.weight[0:8]", "Tile", 7, {7}});
  UnitsConfig config;
  config.layer_bytes = 20;
  const auto units = find_units(tree, config);
  EXPECT_EQ(names(units), (Names{"", "emb", "blocks.0", "blocks.1", "head.weight[0:8]"}));
  EXPECT_FALSE(units.back().block);
}

TEST(FindUnits, WithoutBlocksNoLayerIsAUnit) {
  ModelTree tree = untied();
  tree.modules[5].type = "Other";
  UnitsConfig config;
  config.layer_bytes = 1;
  EXPECT_EQ(find_units(tree, config).size(), 1U);
}

TEST(AssumeOrder, LayersAreWhereTheModelHasThem) {
  UnitsConfig config;
  config.layer_bytes = 64;
  ModelTree tree = untied();
  tree.modules[1].rows = 0;
  ModelDesc model;
  assume_order(model, tree, find_units(tree, config));
  const std::vector<Visit> forward = {{0, Mark::kBegin}, {1}, {2}, {3}, {4}, {0, Mark::kEnd}};
  EXPECT_EQ(model.forward, forward);
  const std::vector<Visit> backward = {{0, Mark::kBegin}, {4}, {3}, {2}, {1, Mark::kGradient},
                                       {0, Mark::kEnd}};
  EXPECT_EQ(model.backward, backward);  // the embedding's backward reads no weight
}

TEST(FindUnits, AModelWithoutParametersIsAnError) {
  ModelTree tree;
  tree.modules = {{"", "Empty", -1, {}}};
  EXPECT_THROW(find_units(tree, {}), ConfigError);
}

}  // namespace
}  // namespace penstock::engine
