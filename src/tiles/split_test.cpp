#include "src/tiles/split.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/error.h"

namespace penstock::tiles {
namespace {

// A root with a linear layer of 10 x 4, whose weight may be tiled and whose bias may not.
ModelTree model() {
  ModelTree tree;
  tree.params = {{"head.weight", torch::rand({10, 4}).set_requires_grad(true)},
                 {"head.bias", torch::rand({10}).set_requires_grad(true)}};
  tree.modules = {{"", "Model", -1, {}}, {"head", "Linear", 0, {0, 1}, 0}};
  return tree;
}

TilingConfig above(int64_t max_bytes, const std::vector<std::string>& modules = {}) {
  TilingConfig tiling;
  tiling.max_bytes = max_bytes;
  tiling.modules = modules;
  return tiling;
}

Split split(const ModelTree& tree, const TilingConfig& tiling, Dtype dtype = Dtype::kFp32) {
  return split_large(tree, tiling, [=](const ParamInfo&) { return dtype; });
}

std::string refused(const ModelTree& tree, const TilingConfig& tiling) {
  try {
    split(tree, tiling);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Split, TilesAreRowsOfTheWeightInModulesOfTheirOwn) {
  const ModelTree tree = model();
  const Split done = split(tree, above(4 * 16));
  ASSERT_EQ(done.tiled.size(), 1u);
  const TiledWeight& head = done.tiled[0];
  EXPECT_EQ(head.first, (std::vector<int64_t>{0, 3, 6, 10}));
  EXPECT_EQ(head.tile_name(2), "head.weight[6:10]");
  EXPECT_TRUE(torch::equal(torch::cat(head.tiles), tree.params[0].param));
  EXPECT_TRUE(head.trainable && head.tiles[1].requires_grad() && head.tiles[1].is_leaf());
  EXPECT_EQ(done.tree.modules[1].params, std::vector<int>{1});  // the bias stays
  ASSERT_EQ(done.tree.params.size(), 5u);
  EXPECT_EQ(done.tree.modules[4].params, std::vector<int>{4});
  EXPECT_EQ(done.tree.params[4].whole, 0);
}

TEST(Split, ATileIsMeasuredInWhatItComputesIn) {
  EXPECT_EQ(split(model(), above(80), Dtype::kBf16).tiled.size(), 0u);
  EXPECT_EQ(split(model(), above(79), Dtype::kBf16).tiled[0].tiles.size(), 2u);
  EXPECT_EQ(split(model(), above(80), Dtype::kFp32).tiled[0].tiles.size(), 2u);
}

TEST(Split, OnlyWhatIsNamedAndTheHead) {
  EXPECT_EQ(split(model(), {}).tiled.size(), 0u);
  EXPECT_EQ(split(model(), above(64, {"h*d"})).tiled.size(), 1u);
  TilingConfig loss;
  loss.loss_tokens = 8;
  loss.head = "head";
  EXPECT_EQ(split(model(), loss).tiled[0].tiles.size(), 1u);
}

TEST(Split, WhatCannotBeSplitIsRefused) {
  EXPECT_NE(refused(model(), above(64, {"hed"})).find("did you mean \"head\"?"), std::string::npos);
  EXPECT_NE(refused(model(), above(15)).find("less than one row of \"head.weight\""),
            std::string::npos);
  ModelTree shared = model();
  shared.modules[0].params = {0};  // the root needs it whole
  EXPECT_NE(refused(shared, above(64, {"head"})).find("needs the parameter"), std::string::npos);
  EXPECT_EQ(split(shared, above(64)).tiled.size(), 0u);
}

}  // namespace
}  // namespace penstock::tiles
