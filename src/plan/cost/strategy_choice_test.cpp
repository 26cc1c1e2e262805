#include "src/plan/cost/strategy_choice.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/table.h"

namespace penstock::offload_choice_test {
namespace {

// Six blocks of 1024 parameters after an empty root, on 4 ranks of 2 nodes, without prefetch and
// without joined moves. Computed by hand for one rank with zero3 in bf16, in bytes: 3072 of
// parameters at rest, 18432 of optimizer state, 3072 of gradients after their reduction, 2048
// gathered at a time.
//
// All on the device, at the first block's backward: these bytes except its own reduced gradient,
// plus its parameters 2048, its partial gradient 2048, and, for the previous block, the partial
// gradient 2048 and the receive buffer 1536: 3072 + 18432 + 2560 + 2048 + 2048 + 3584 = 31744.
constexpr int64_t kAll = 31744;
// Without the parameters at rest; without optimizer state and reduced gradients; without all three.
constexpr int64_t kParamsAway = kAll - 3072, kOptimAway = kAll - 18432 - 2560;
constexpr int64_t kBothAway = kOptimAway - 3072;
constexpr int64_t kOptimHost = 18432 + 3072;  // optimizer state and gradients
// On disk: one block's state being written, one updated, one read, and gradients of 5 blocks.
constexpr int64_t kOptimWindow = 3 * 3072 + 5 * 512;

// Returns the smallest limit with which a tenth stays free beside these bytes.
constexpr int64_t roomy(int64_t bytes) {
  int64_t limit = bytes;
  while (limit - limit / 10 < bytes) ++limit;
  return limit;
}

ModelDesc blocks() {
  ModelDesc model;
  model.units = {{.name = "root", .flats = {}}};
  for (int i = 0; i < 6; ++i) model.units.push_back({"block", {{1024, Dtype::kBf16}}});
  assume_order(model, true);
  return model;
}

Question question(const Room& room, const std::string& offload = R"("auto")",
                  const std::string& strategy = "zero3") {
  Config config = Config::parse(
      concat(R"({"mesh": {"node": 2}, "prefetch_bytes": 0, "comm": {"bucket_bytes": 0},
                 "optimizer": {}, "strategy": ")",
             strategy, R"(", "offload": )", offload, "}"));
  config.resolve(4);
  return {{config, 4, 0, Machine::cpu(), room}, {strategy}, false};
}

std::string chosen(const Question& question) {
  const std::vector<Alternative> all = alternatives(question, blocks());
  if (!all.front().fits) return "nothing: " + all.front().over;
  return concat(all.front().optimizer, " ", all.front().params);
}

struct ChoiceCase {
  const char* name;
  Room room;
  const char* chosen;
  const char* offload = R"("auto")";
  const char* strategy = "zero3";
};

const ChoiceCase kCases[] = {
    {"room for all", {}, "none none"},
    {"just room for all", {.device = roomy(kAll)}, "none none"},
    {"a byte less: parameters leave", {.device = roomy(kAll) - 1}, "none host"},
    {"less: the optimizer leaves instead", {.device = roomy(kParamsAway) - 1}, "host none"},
    {"both", {.device = roomy(kOptimAway) - 1}, "host host"},
    {"no tenth to spare anywhere: the fastest that fits", {.device = kBothAway}, "host host"},
    {"little host memory: optimizer in a window",
     {.device = roomy(kOptimAway), .host = roomy(kOptimHost) - 1},
     "disk none"},
    {"one limit for both: the host gains nothing", {.memory = roomy(kAll) - 1}, "none disk"},
    {"too little for anything", {.device = kBothAway - 1000}, "nothing: device 1000 B over"},
    {"a full disk",
     {.device = kOptimAway, .host = kOptimHost - 2, .disk = 18431},
     "nothing: disk 1 B over"},
    {"one role is open",
     {.device = roomy(kParamsAway) - 1},
     "host none",
     R"({"optimizer": "auto"})"},
    {"the other", {.device = roomy(kAll) - 1}, "none host", R"({"params": "auto"})"},
    {"no role is open", {.device = kAll - 1}, "nothing: device 1 B over", "{}"},
    {"parameters that rest whole stay", {.device = kAll}, "host none", R"("auto")", "zero1"},
};

TEST(Choice, BudgetsToTiers) {
  for (const ChoiceCase& c : kCases) {
    const Question asked = question(c.room, c.offload, c.strategy);
    EXPECT_EQ(chosen(asked), c.chosen) << c.name << "\n"
                                       << choice_text(alternatives(asked, blocks()));
  }
}

TEST(Choice, BytesByHand) {
  for (const Alternative& one : alternatives(question({}), blocks())) {
    const bool params = one.params != "none", optimizer = one.optimizer != "none";
    const int64_t device = optimizer ? kOptimAway : kAll;
    EXPECT_EQ(one.device, device - (params ? 3072 : 0)) << one.text();
    EXPECT_EQ(one.disk, (one.optimizer == "disk" ? 18432 : 0) + (one.params == "disk" ? 3072 : 0));
    EXPECT_TRUE(one.memory <= one.device + one.host && one.memory >= one.device);
    if (one.params == "disk") continue;
    const int64_t host = one.optimizer == "disk" ? kOptimWindow : optimizer ? kOptimHost : 0;
    EXPECT_EQ(one.host, host + (params ? 3072 : 0)) << one.text();
  }
}

TEST(Choice, AnOptimizerOfTheUsersOwnStaysInMemory) {
  Question asked = question({.device = kOptimAway});
  asked.external_optimizer = true;
  for (const Alternative& one : alternatives(asked, blocks())) EXPECT_NE(one.optimizer, "disk");
  asked.asked.config.offload.optimizer = "disk";
  EXPECT_TRUE(alternatives(asked, blocks()).empty());
  EXPECT_NE(refusal(asked, blocks()).find("one of the engine's optimizers"), std::string::npos);
}

TEST(Choice, HpzMayKeepItsSecondCopyOnDisk) {
  const std::vector<Alternative> all = alternatives(question({}, R"("auto")", "hpz"), blocks());
  EXPECT_TRUE(std::any_of(all.begin(), all.end(),
                          [](const Alternative& one) { return one.params == "disk"; }));
}

TEST(Choice, WhatComputeHidesDecidesWhenTokensAreMany) {
  Question asked = question({});
  asked.asked.config.offload.optimizer = "host";
  const auto seconds = [&] { return alternatives(asked, blocks()).front().seconds; };
  const double links_alone = seconds();
  asked.asked.tokens = 1e6;
  // 6 x 6144 parameters x 1e6 tokens, plus an update that does not overlap.
  EXPECT_GT(links_alone, 0);
  EXPECT_NEAR(seconds(), 6.0 * 6144 * 1e6 / Machine::cpu().flops, 1e-4);
}

TEST(Choice, TheRefusalNamesWhatFits) {
  const Room room{.device = roomy(kOptimAway)};
  const std::vector<Alternative> set = alternatives(question(room, "{}"), blocks());
  try {
    refuse(set.front(), alternatives(question(room), blocks()), room);
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()),
              "[plan::refuse] strategy \"zero3\", offload.optimizer \"none\", "
              "offload.params \"none\", offload.gradients \"none\" needs 31.00 KiB of device, but "
              "11.67 KiB is allowed on each "
              "rank; this fits: strategy \"zero3\", offload.optimizer \"host\", offload.params "
              "\"none\", offload.gradients \"none\"");
  }
  EXPECT_THROW(refuse(set.front(), {}, room), ConfigError);
}

// Returns the question for an error's advice. Every tier is open in it.
Question open_question(const Room& room, const std::string& offload = "{}") {
  Question open = question(room, offload);
  open_all(open);
  return open;
}

TEST(Choice, AdviceTakesLessOfWhatRanOut) {
  const Question asked = open_question({});
  const OffloadConfig now = Config::parse("{}").offload;
  const std::string beyond =
      " (the prediction does not include gathered(), weights that are read outside their module, "
      "or units that do not run in the order in which the model lists them)";
  EXPECT_EQ(advice(asked, blocks(), now, &Alternative::device).find("strategy \"zero3\""), 0u);
  EXPECT_NE(advice(asked, blocks(), now, &Alternative::device).find(" predicted, not 31.00 KiB"),
            std::string::npos);
  EXPECT_EQ(advice(asked, blocks(), now, &Alternative::disk),
            "no offload that fits needs less: use more ranks or allow more" + beyond);
}

TEST(Choice, GradientsAreTriedToo) {
  const auto with_gradients = [](const Alternative& one) { return one.gradients != "none"; };
  const std::vector<Alternative> set = alternatives(question({}), blocks());
  EXPECT_TRUE(std::none_of(set.begin(), set.end(), with_gradients));
  // Optimizer x params x gradients; "disk" needs an optimizer that is offloaded.
  const std::vector<Alternative> all = alternatives(open_question({}), blocks());
  EXPECT_EQ(all.size(), 3u * 3u * 3u - 3u);
  // State on disk fits if nothing else does.
  const auto least = std::min_element(
      all.begin(), all.end(), [](const auto& a, const auto& b) { return a.memory < b.memory; });
  const Alternative best = alternatives(open_question({.memory = least->memory}), blocks()).front();
  EXPECT_TRUE(best.fits);
  EXPECT_EQ(best.gradients, "disk");
  EXPECT_NE(choice_text(all).find("gradients"), std::string::npos);
  EXPECT_EQ(choice_text(set).find("gradients"), std::string::npos);
}

}  // namespace
}  // namespace penstock::offload_choice_test
