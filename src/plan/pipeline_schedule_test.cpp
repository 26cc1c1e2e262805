#include "src/plan/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "src/base/text.h"
#include "src/plan/refusal.h"

namespace penstock::pipeline_schedule_test {
namespace {

TEST(Schedule, OrdersOfTheLiterature) {
  EXPECT_EQ(make_schedule("gpipe", {2, 1, 2}).text(), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
  EXPECT_EQ(make_schedule("1f1b", {2, 1, 3}).text(),
            "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(make_schedule("interleaved", {2, 2, 2}).text(),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n");
  EXPECT_EQ(make_schedule("zero_bubble", {2, 1, 3}).text(),
            "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n");
}

// Numbers of torch's own schedules with P = 4 and M = 8: a forward of one time unit and a backward
// of two.
TEST(Schedule, IdleTimeAndWhatIsHeld) {
  const Replay gpipe = replay(make_schedule("gpipe", {4, 1, 8}), 1, 2);
  const Replay one = replay(make_schedule("1f1b", {4, 1, 8}), 1, 2);
  const Replay two = replay(make_schedule("interleaved", {4, 2, 8}), 0.5, 1);
  const Replay breadth = replay(make_schedule("gpipe", {4, 2, 8}), 0.5, 1);
  // ZB-H1: (P - 1) (forward + inputs - weights), and no more held than on the first rank of 1f1b.
  const Replay split = replay(make_schedule("zero_bubble", {4, 1, 8}), 1, 2);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_DOUBLE_EQ(split.idle[rank], 3);
    EXPECT_EQ(split.most_held[rank], 4);
    EXPECT_DOUBLE_EQ(gpipe.idle[rank], 9);
    EXPECT_DOUBLE_EQ(one.idle[rank], 9);
    EXPECT_DOUBLE_EQ(two.idle[rank], 4.5);
    EXPECT_DOUBLE_EQ(breadth.idle[rank], 4.5);
    EXPECT_EQ(gpipe.most_held[rank], 8);
    EXPECT_EQ(one.most_held[rank], 4 - rank);
  }
  EXPECT_EQ(two.most_held[0], 11);  // halves of a micro-batch: 5.5
}

// All actions are in the order, each rank's in its own order and each after what it waits for.
void check_rounds(const Schedule& schedule) {
  std::set<Action> done;
  Schedule again{std::vector<std::vector<Action>>(schedule.ranks.size())};
  for (const Action& action : in_rounds(schedule)) {
    const Action needed = before(action, schedule.num_stages());
    EXPECT_TRUE(needed.stage < 0 || done.contains(needed)) << action.text();
    done.insert(action);
    if (action.part == BackwardPart::kInputs) done.insert({action.stage, false, action.micro});
    again.ranks[static_cast<size_t>(action.stage) % schedule.ranks.size()].push_back(action);
  }
  EXPECT_EQ(again, schedule);
}

TEST(Schedule, EveryShapeIsWhole) {
  int num_cases = 0;
  for (const std::string& name : schedule_names()) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (int virtual_stages = 1; virtual_stages <= 3; ++virtual_stages) {
        for (int micro = 1; micro <= 17; ++micro) {
          const PipelineShape shape{ranks, virtual_stages, micro};
          const bool fits = name != "interleaved" || virtual_stages == 1 ||
                            micro % std::max(1, micro / ranks) == 0;
          const bool has_one = name == "1f1b" || name == "zero_bubble";
          if (!fits || (has_one && virtual_stages > 1)) {
            EXPECT_NE(refusal([&] { make_schedule(name, shape); }), "");
            continue;
          }
          const Schedule schedule = make_schedule(name, shape);
          check_schedule(schedule);
          EXPECT_EQ(parse_schedule(schedule.text()), schedule);
          EXPECT_EQ(schedule.num_stages(), ranks * virtual_stages);
          EXPECT_EQ(schedule.num_micro(), micro);
          check_rounds(schedule);
          ++num_cases;
        }
      }
    }
  }
  std::printf("%d schedules\n", num_cases);
}

TEST(Schedule, WhatIsWrongIsNamed) {
  const auto parse = [](const char* csv) { return refusal([&] { parse_schedule(csv); }); };
  EXPECT_EQ(parse("0F0,,0B0\n,1F0,1B0\n"), "");
  EXPECT_EQ(parse("0F0,0B0\n1B0,1F0\n"),
            "[plan::Schedule] the order cannot finish; waiting: rank 0 at 0B0 for 1B0, rank 1 at "
            "1B0 for 1F0");
  EXPECT_EQ(parse("0F0,0B0,0F0\n1F0,1B0\n"), "[plan::Schedule] 0F0 is listed twice");
  EXPECT_EQ(parse("0F0,0B0\n1F0\n"), "[plan::Schedule] 1B0 is missing");
  EXPECT_EQ(parse("0F0,1F0,0B0\n1B0\n"),
            "[plan::Schedule] 1F0 is on rank 0, but stage 1 is on rank 1");
  EXPECT_EQ(parse("0F0,0I0,0W0\n1F0,1B0\n"), "");
  EXPECT_EQ(parse("0F0,0I0\n"), "[plan::Schedule] 0W0 is missing");
  EXPECT_EQ(parse("0F0,0W0\n"), "[plan::Schedule] 0I0 is missing");
  EXPECT_EQ(parse("0F0,0I0,0W0,0B0\n"),
            "[plan::Schedule] 0B0 is listed beside its parts 0I0 and 0W0");
  EXPECT_EQ(parse("0F0,0W0,0I0\n"),
            "[plan::Schedule] the order cannot finish; waiting: rank 0 at 0W0 for 0B0");
  EXPECT_NE(parse("0F0,x\n").find("cell 'x' is not an action"), std::string::npos);
  EXPECT_EQ(parse("\n"), "[plan::Schedule] the schedule has no actions");
  EXPECT_NE(refusal([] { make_schedule("1f1", {2, 1, 2}); }).find("did you mean \"1f1b\"?"),
            std::string::npos);
  EXPECT_NE(refusal([] { make_schedule("gpipe", {2, 1, 0}); }), "");
}

}  // namespace
}  // namespace penstock::pipeline_schedule_test
