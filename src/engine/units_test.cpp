#include "src/engine/units.h"

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
  EXPECT_EQ(find_units(tree, {}).size(), 1U);  // small: the root alone
  UnitsConfig config;
  config.max_bytes = 128;
  EXPECT_EQ(find_units(tree, config).size(), 3U);
}

TEST(FindUnits, AModelWithoutParametersIsAnError) {
  ModelTree tree;
  tree.modules = {{"", "Empty", -1, {}}};
  EXPECT_THROW(find_units(tree, {}), ConfigError);
}

}  // namespace
}  // namespace penstock::engine
