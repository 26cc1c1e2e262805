#include "src/parallel/tensor_rules.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "penstock/error.h"

namespace penstock::parallel {
namespace {

using Rules = std::vector<std::pair<std::string, std::string>>;

// A root with an embedding that is tied to the head, a fused projection, a row, a norm.
ModelTree tree() {
  ModelTree tree;
  const auto param = [&](const char* name, at::IntArrayRef sizes) {
    tree.params.push_back({name, at::zeros(sizes)});
    return static_cast<int>(tree.params.size()) - 1;
  };
  const auto module = [&](const char* name, const char* type, std::vector<int> params) {
    tree.modules.push_back({name, type, name[0] == '\0' ? -1 : 0, std::move(params)});
  };
  const int table = param("wte.weight", {11, 8});
  module("", "Model", {});
  module("wte", "Embedding", {table});
  module("attn.qkv", "Linear", {param("attn.qkv.weight", {24, 8}), param("attn.qkv.bias", {24})});
  module("attn.proj", "Linear", {param("attn.proj.weight", {8, 8}), param("attn.proj.bias", {8})});
  module("mlp", "Conv1D", {param("mlp.weight", {8, 32}), param("mlp.bias", {32})});
  module("norm", "LayerNorm", {param("norm.weight", {8}), param("norm.bias", {8})});
  module("head", "Linear", {table});
  return tree;
}

std::string told(const Rules& rules, int count = 2) {
  ModelTree model = tree();
  try {
    apply(rules, MeshConfig{.tensor = count}, &model);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Rules, GiveParametersTheirCuts) {
  ModelTree model = tree();
  const std::vector<Ruled> ruled = apply({{"*.qkv", "column:3"},
                                          {"*.proj", "row"},
                                          {"mlp", "column"},
                                          {"norm", "partial"},
                                          {"wte", "vocab"},
                                          {"head", "vocab"},
                                          {"attn.heads", "divide"}},
                                         MeshConfig{.tensor = 2}, &model);
  ASSERT_EQ(ruled.size(), 6);
  const auto cut = [&](size_t index) { return model.params[index].cut; };
  EXPECT_EQ(cut(0), (Cut{TensorCut::kCut, 0, {11}}));
  EXPECT_EQ(cut(1), (Cut{TensorCut::kCut, 0, {8, 8, 8}}));
  EXPECT_EQ(cut(2), (Cut{TensorCut::kCut, 0, {8, 8, 8}}));
  EXPECT_EQ(cut(3), (Cut{TensorCut::kCut, 1, {8}}));
  EXPECT_EQ(cut(4), Cut{});
  EXPECT_EQ(cut(5), (Cut{TensorCut::kCut, 1, {32}}));
  EXPECT_EQ(cut(6), (Cut{TensorCut::kCut, 0, {32}}));
  EXPECT_EQ(cut(7).kind, TensorCut::kPartial);
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(cut(1).ranges(1, 2), (Ranges{{4, 8}, {12, 16}, {20, 24}}));
  EXPECT_EQ(cut(0).ranges(0, 2), (Ranges{{0, 6}}));
  EXPECT_EQ(cut(0).size(1, 2), 5);
  EXPECT_TRUE(ruled[3].transposed);
  EXPECT_EQ(ruled[0].size, 11);
  EXPECT_STREQ(style_name(ruled[2].style), "row");
}

TEST(Rules, ModulesMayComputeWithTheirOwnParts) {
  ModelTree model = tree();
  const Rules rules = {{"wte.weight", "own_rows:1"},
                       {"attn.qkv.weight", "own_rows:3"},
                       {"attn.proj.weight", "own_columns"},
                       {"norm.bias", "own_rows"}};
  model.params[0].param = at::zeros({12, 8});  // also the head's, which has no rule
  EXPECT_TRUE(apply(rules, MeshConfig{.tensor = 2}, &model).empty());
  EXPECT_EQ(model.params[0].cut, (Cut{TensorCut::kCut, 0, {12}}));
  EXPECT_EQ(model.params[1].cut, (Cut{TensorCut::kCut, 0, {8, 8, 8}}));
  EXPECT_EQ(model.params[2].cut, Cut{});
  EXPECT_EQ(model.params[3].cut, (Cut{TensorCut::kCut, 1, {8}}));
  EXPECT_EQ(model.params[8].cut, (Cut{TensorCut::kCut, 0, {8}}));
}

TEST(Rules, TheFirstThatMatchesCounts) {
  ModelTree model = tree();
  apply({{"attn.proj", "whole"}, {"attn.*", "column"}}, MeshConfig{.tensor = 2}, &model);
  EXPECT_EQ(model.params[3].cut, Cut{});
  EXPECT_EQ(model.params[1].cut.kind, TensorCut::kCut);
}

TEST(Rules, SharedHeadsStayWhole) {
  ModelTree model = tree();
  const std::vector<Ruled> ruled =
      apply({{"attn.qkv", "shared:2"}}, MeshConfig{.tensor = 4}, &model);
  EXPECT_EQ(ruled.front().heads, 2);
  EXPECT_EQ(model.params[1].cut.kind, TensorCut::kPartial);
  EXPECT_EQ(model.params[2].cut.kind, TensorCut::kPartial);
  for (const int count : {1, 2}) {  // at least as many heads as ranks
    ModelTree other = tree();
    EXPECT_EQ(apply({{"attn.qkv", "shared:2"}}, MeshConfig{.tensor = count}, &other).front().style,
              Style::kColumn);
    EXPECT_EQ(other.params[1].cut, count == 1 ? Cut{} : (Cut{TensorCut::kCut, 0, {24}}));
  }
}

TEST(Rules, DivideExperts) {
  ModelTree model = tree();
  model.params.push_back({"experts.up", at::zeros({4, 8, 16})});
  const int up = static_cast<int>(model.params.size()) - 1;
  model.modules.push_back({"experts", "Experts", 0, {up}});
  const Rules rules = {{"*experts", "expert"}, {"attn.*", "column"}};
  const Cut divided{TensorCut::kCut, 0, {4}, Axis::kExpert};
  const auto cut = [&](const MeshConfig& mesh) {
    ModelTree cut = model;
    EXPECT_EQ(apply(rules, mesh, &cut).size(), 2);  // experts are not layers that tensor ranks cut
    EXPECT_EQ(cut.params[1].cut.kind, mesh.tensor > 1 ? TensorCut::kCut : TensorCut::kWhole);
    return cut.params[static_cast<size_t>(up)].cut;
  };
  EXPECT_EQ(cut({}), Cut{});
  EXPECT_EQ(cut({.expert = 2}), divided);
  EXPECT_EQ(cut({.tensor = 2, .expert = 4}), divided);
  // The first rule that matches a parameter counts.
  model.params.push_back({"experts.bias", at::zeros({4, 8})});
  model.modules.back().params.push_back(up + 1);
  apply({{"experts.bias", "whole"}, {"*experts", "expert"}}, {.expert = 2}, &model);
  EXPECT_EQ(model.params[static_cast<size_t>(up)].cut, divided);
  EXPECT_EQ(model.params[static_cast<size_t>(up) + 1].cut, Cut{});
}

TEST(Rules, WhatCannotBeIsNamed) {
  const std::pair<Rules, const char*> cases[] = {
      {{{"attn.qkv", "columns"}}, "did you mean \"column\""},
      {{{"attn.qkv", "column:x"}}, "whole numbers after the colon"},
      {{{"attn.qkv", "column:0"}}, "whole numbers after the colon"},
      {{{"attn.qkv", "vocab:2"}}, "takes no numbers"},
      {{{"attn.q", "column"}}, "no module or parameter matches this pattern"},
      {{{"norm", "column"}}, "The model has: wte, attn.qkv, attn.proj, mlp, head"},
      {{{"attn.qkv", "column:5"}}, "has size 24, which cannot be divided into 5 equal parts"},
      {{{"attn.qkv", "column:16,4"}}, "not the sum of its parts"},
      {{{"attn.qkv", "column:21,3"}}, "has a part of size 21, which is not divisible by 2"},
      {{{"wte", "vocab"}}, "which module \"head\" also uses"},
      {{{"wte", "vocab"}, {"head", "row"}}, "cuts it differently"},
      {{{"wte", "row"}}, "is an embedding"},
      {{{"attn.qkv", "shared:3"}}, "divides the 2 tensor ranks"},
      {{{"norm.weight", "column"}}, "is a parameter"},
      {{{"norm", "own_rows"}}, "is a module. Name its parameters"},
      {{{"norm.weight", "own_columns"}}, "\"norm.weight\" has 1 dims"},
      {{{"wte.weight", "own_rows"}}, "\"wte.weight\" has size 11, which is not divisible by 2"},
  };
  for (const auto& [rules, part] : cases) {
    EXPECT_NE(told(rules).find(part), std::string::npos) << told(rules);
  }
  EXPECT_NE(told({{"attn.proj", "column"}}, 3).find("is not divisible by 3 tensor ranks"),
            std::string::npos);
}

}  // namespace
}  // namespace penstock::parallel
