#include "src/engine/mesh/stage_window.h"

#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/plan/plan.h"

namespace penstock::engine {
namespace {

// Four stages on two ranks. Unit 0 is the root, unit 5 has weights that stages 0 and 3 share.
StageWindow window_of(int index) {
  Stages stages;
  stages.count = 4;
  stages.of_param = {{0}, {1}, {2}, {3}, {0, 3}};
  std::vector<UnitSpec> specs(6);
  for (int unit = 1; unit < 6; ++unit) specs[static_cast<size_t>(unit)].params = {unit - 1};
  ParallelConfig config;
  config.virtual_stages = 2;
  config.schedule = "interleaved";
  Members members;
  members.index = index;
  members.ranks = {0, 1};
  return {members, stages, specs, config};
}

std::string text_of(const std::vector<Visit>& visits) {
  std::string text;
  for (const Visit& visit : visits) {
    text += std::to_string(visit.stage) + ":u" + std::to_string(visit.unit) + mark_text(visit.mark);
    text += " ";
  }
  return text;
}

TEST(StageWindow, VisitsOfARanksStages) {
  ModelDesc model;
  model.units.resize(6);
  model.forward = {{0, Mark::kBegin}, {5}, {1}, {3}, {0, Mark::kEnd}};
  model.backward = {{3}, {1}, {5}};
  EXPECT_EQ(window_of(0).stages(), (std::vector<int>{0, 2}));
  const ModelDesc staged = window_of(0).by_stage(model, {});
  EXPECT_EQ(text_of(staged.forward), "0:u0 begin 0:u5 0:u1 0:u0 end 2:u0 begin 2:u3 2:u0 end ");
  EXPECT_EQ(text_of(staged.backward), "0:u1 0:u5 2:u3 ");
  // A unit that is read outside of its module is visited in every stage.
  EXPECT_EQ(text_of(window_of(0).by_stage(model, {5}).backward), "0:u1 0:u5 2:u3 2:u5 ");
  model.forward = {{5}, {2}, {4}};
  EXPECT_EQ(text_of(window_of(1).by_stage(model, {}).forward), "1:u2 3:u5 3:u4 ");
}

TEST(StageWindow, PlacesOfActions) {
  StageWindow window = window_of(0);
  EXPECT_FALSE(window.now(true));
  const Schedule schedule = window.schedule(2, true);
  EXPECT_TRUE(window.begin(schedule, true));
  EXPECT_FALSE(window.now(true));
  const std::vector<Action>& actions = schedule.ranks[0];
  for (size_t i = 0; i < actions.size(); ++i) {
    window.start(actions[i]);
    const auto turn = window.now(actions[i].forward);
    ASSERT_TRUE(turn);
    EXPECT_EQ(turn->number, static_cast<int>(i));
    EXPECT_EQ(turn->stage, actions[i].stage);
    EXPECT_TRUE(turn->trains);
    EXPECT_FALSE(window.now(!actions[i].forward));
    EXPECT_TRUE(window.computes(0));
    EXPECT_EQ(window.computes(1), actions[i].stage == 0);
    EXPECT_EQ(window.computes(3), actions[i].stage == 2);
  }
  EXPECT_THROW(window.start(actions[0]), RuntimeFault);
  window.end();
  EXPECT_FALSE(window.now(false));
  EXPECT_FALSE(window.begin(schedule, true));  // its plans exist
  EXPECT_THROW(window.start(actions[1]), RuntimeFault);
  EXPECT_TRUE(window.begin(window.schedule(4, true), true));
}

TEST(StageWindow, EvaluationsHaveForwardsAlone) {
  StageWindow window = window_of(1);
  const Schedule schedule = window.schedule(3, false);
  EXPECT_FALSE(window.begin(schedule, false));
  EXPECT_TRUE(window.trained().ranks.empty());
  ASSERT_EQ(schedule.ranks[1].size(), 6U);
  window.start(schedule.ranks[1][0]);
  EXPECT_FALSE(window.now(true)->trains);
}

}  // namespace
}  // namespace penstock::engine
