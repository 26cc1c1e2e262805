#include "penstock/optimizer_kinds.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::optimizer_kinds_test {
namespace {

using enum OptimizerType;

TEST(OptimizerKinds, EachTypeHasItsRow) {
  ASSERT_EQ(optimizer_kinds().size(), static_cast<size_t>(kNumOptimizerTypes));
  for (int i = 0; i < kNumOptimizerTypes; ++i) {
    const auto type = static_cast<OptimizerType>(i);
    const OptimizerKind& kind = kind_of(type);
    EXPECT_EQ(kind.defaults.type, type) << kind.name;
    EXPECT_EQ(find_optimizer(kind.name), &kind);
  }
  EXPECT_THROW(kind_of(static_cast<OptimizerType>(kNumOptimizerTypes)), Bug);
}

TEST(OptimizerKinds, NamesAreFoundInAnyCaseAndNothingElseIs) {
  EXPECT_EQ(find_optimizer("aDaMw"), &kind_of(kAdamW));
  EXPECT_EQ(find_optimizer("sgd"), &kind_of(kSgd));
  for (const char* none : {"", "Ada", "Adam2", "LAMB"}) EXPECT_EQ(find_optimizer(none), nullptr);
}

TEST(OptimizerKinds, EveryKeyIsKnownAndTaken) {
  std::set<std::string> taken;
  for (const OptimizerKind& kind : optimizer_kinds()) {
    EXPECT_TRUE(kind.takes("lr") && kind.takes("weight_decay")) << kind.name;
    for (const std::string& key : kind.keys) {
      EXPECT_EQ(optimizer_key(key).name, key);
      EXPECT_TRUE(taken.insert(concat(kind.name, " ", key)).second) << kind.name << " " << key;
    }
  }
  for (const OptimizerKey& key : optimizer_keys()) {
    bool used = false;
    for (const OptimizerKind& kind : optimizer_kinds()) used |= kind.takes(key.name);
    EXPECT_TRUE(used) << key.name;
  }
  EXPECT_THROW(optimizer_key("alpha"), Bug);
}

TEST(OptimizerKinds, AConfigAsItStandsIsAdamW) {
  Config config = Config::parse(R"({"optimizer": {}})");
  const std::string parsed = config.json();
  *config.optimizer = OptimizerConfig{};
  EXPECT_EQ(config.json(), parsed);
  *config.optimizer = kind_of(kAdamW).defaults;
  EXPECT_EQ(config.json(), parsed);
}

// Defaults of torch.optim, and of arXiv:2302.06675. A Python test compares the defaults of
// torch.optim with torch.
TEST(OptimizerKinds, Defaults) {
  EXPECT_EQ(kind_of(kAdamW).defaults.weight_decay, 0.01);
  EXPECT_EQ(kind_of(kAdam).defaults.weight_decay, 0.0);
  EXPECT_EQ(kind_of(kSgd).defaults.lr, 1e-3);
  EXPECT_EQ(kind_of(kAdagrad).defaults.lr, 1e-2);
  EXPECT_EQ(kind_of(kAdagrad).defaults.eps, 1e-10);
  EXPECT_EQ(kind_of(kLion).defaults.lr, 1e-4);
  EXPECT_EQ(kind_of(kLion).defaults.betas[1], 0.99);
}

TEST(OptimizerKinds, Moments) {
  OptimizerConfig sgd = kind_of(kSgd).defaults;
  EXPECT_EQ(num_moments(sgd), 0);
  sgd.momentum = 0.9;
  EXPECT_EQ(num_moments(sgd), 1);
  EXPECT_EQ(num_moments({.type = kAdamW}), 2);
  EXPECT_EQ(num_moments({.type = kAdam}), 2);
  EXPECT_EQ(num_moments({.type = kAdagrad}), 1);
  EXPECT_EQ(num_moments({.type = kLion}), 1);
  EXPECT_FALSE(kind_of(kAdagrad).takes("moments_dtype"));  // its sum only grows
}

TEST(OptimizerKinds, DocumentedNamesAreTheRealOnes) {
  std::ifstream file(std::string(PENSTOCK_SOURCE_DIR) + "/docs/config.md");
  std::set<std::string> documented, real;
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> cells = split(line, '|');
    if (line.rfind("| `optimizer.type` |", 0) != 0) continue;
    const std::vector<std::string> words = split(cells.at(3), '"');
    for (size_t i = 1; i < words.size(); i += 2) documented.insert(words[i]);
  }
  for (const OptimizerKind& kind : optimizer_kinds()) real.insert(kind.name);
  EXPECT_EQ(documented, real);
}

TEST(OptimizerKinds, AMisspeltNameIsRefusedWithTheNearest) {
  try {
    Config::parse(R"({"optimizer": {"type": "adagrat"}})");
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(R"("optimizer.type" is "adagrat")"), std::string::npos) << text;
    EXPECT_NE(text.find(R"(did you mean "Adagrad"?)"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace penstock::optimizer_kinds_test
