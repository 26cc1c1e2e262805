#include "src/plan/cost/strategy_comparison.h"

#include <gtest/gtest.h>

#include <set>

#include "src/base/text.h"

namespace penstock::strategy_comparison_test {
namespace {

PlanReport report_on(int num_nodes, int world_size) {
  PlanQuestion asked{.config = Config::parse(concat(R"({"mesh": {"node": )", num_nodes, "}}")),
                     .world_size = world_size,
                     .tokens = 64,
                     .machine = Machine::cpu(),
                     .room = {.host = 1 << 20}};
  asked.config.resolve(world_size);
  ModelDesc model;
  model.units = {{.name = "root", .flats = {}}, {.name = "block", .flats = {{1024, Dtype::kBf16}}}};
  assume_order(model, true);
  return compare(asked, model, 1000);
}

TEST(Comparison, StrategiesThatAreAlikeOnTheMeshAreTriedOnce) {
  using Twins = std::map<std::string, std::string>;
  EXPECT_EQ(report_on(2, 4).same, Twins());
  // On one node hpz has no separate copy, and mics shards over all ranks.
  EXPECT_EQ(report_on(1, 4).same, (Twins{{"hpz", "zero3"}, {"mics", "zero3"}}));
  EXPECT_EQ(report_on(1, 1).same.at("zero2"), "ddp");
}

TEST(Comparison, EveryTierIsTriedWhateverTheConfigAsks) {
  std::set<std::string> tried;
  for (const Alternative& one : report_on(1, 4).alternatives) {
    if (one.strategy == "zero3") tried.insert(one.optimizer + " " + one.params);
  }
  EXPECT_EQ(tried,
            (std::set<std::string>{"none none", "none host", "none disk", "host none", "host host",
                                   "host disk", "disk none", "disk host", "disk disk"}));
}

TEST(Comparison, TheTextNamesTheModelTheRoomAndTheTwins) {
  const std::string text = report_on(1, 4).text;
  EXPECT_EQ(text.find("1000 parameters in 2 units, 4 ranks, 64 tokens per rank and step"), 0u)
      << text;
  EXPECT_NE(text.find("each rank has host 1.00 MiB\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nhpz is zero3 on this mesh\nmics is zero3 on this mesh\n"),
            std::string::npos)
      << text;
}

TEST(Comparison, ACodecPaysIfLinksAreSlow) {
  const auto report_with = [](const char* config, double node) {
    PlanQuestion asked{.config = Config::parse(config),
                       .world_size = 4,
                       .tokens = 64,
                       .machine = Machine::cpu(),
                       .room = {}};
    asked.machine.node = node;
    asked.config.resolve(4);
    ModelDesc model;
    model.units = {{.name = "root", .flats = {}},
                   {.name = "block", .flats = {{1 << 20, Dtype::kBf16}}}};
    assume_order(model, true);
    return compare(asked, model, 1 << 20);
  };
  constexpr const char* kNodes = R"({"mesh": {"node": 2}})";
  const PlanReport slow = report_with(kNodes, 1e6), fast = report_with(kNodes, 1e12);
  for (const PlanReport& report : {slow, fast}) {
    ASSERT_EQ(report.codecs.size(), 3u);
    EXPECT_EQ(report.codecs[0].codec, "int8");
    EXPECT_EQ(report.codecs[0].average, report.codecs[0].best.seconds);
    EXPECT_EQ(report.codecs[2].codec, "1bit");
  }
  const double exact = slow.alternatives.front().seconds;
  EXPECT_LT(slow.codecs[0].best.seconds, 0.7 * exact);
  EXPECT_LT(slow.codecs[1].best.seconds, slow.codecs[0].best.seconds);
  EXPECT_LT(slow.codecs[2].best.seconds, slow.codecs[1].best.seconds);
  EXPECT_DOUBLE_EQ(slow.codecs[2].average, 0.15 * exact + 0.85 * slow.codecs[2].best.seconds);
  EXPECT_EQ(slow.text.find("does not pay"), std::string::npos) << slow.text;
  EXPECT_EQ(fast.text.find("it pays here"), std::string::npos) << fast.text;
  EXPECT_NE(slow.text.find("\"comm.codec\": \"1bit\" would take"), std::string::npos) << slow.text;
  const PlanReport asks = report_with(R"({"mesh": {"node": 2}, "comm": {"codec": "int8"}})", 1e6);
  EXPECT_TRUE(asks.codecs.empty());
  EXPECT_DOUBLE_EQ(asks.alternatives.front().seconds, slow.codecs[0].best.seconds);
  const PlanReport own =
      report_with(R"({"mesh": {"node": 2}, "optimizer": {"type": "Adagrad"}})", 1e6);
  EXPECT_EQ(own.codecs.size(), 2u);  // no signs
}

}  // namespace
}  // namespace penstock::strategy_comparison_test
