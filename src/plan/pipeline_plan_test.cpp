#include "src/plan/pipeline_plan.h"

#include <gtest/gtest.h>

#include <map>

#include "src/plan/refusal.h"

namespace penstock::pipeline_plan_test {
namespace {

// `num_units` blocks, one per stage, in order.
ModelDesc blocks(int num_units, int num_stages) {
  ModelDesc model;
  for (int unit = 0; unit < num_units; ++unit) {
    UnitDesc& desc = model.units.emplace_back();
    desc.name = "block";
    desc.flats = {{64}};
  }
  assume_order(model, false);
  for (auto* order : {&model.forward, &model.backward}) {
    for (Visit& visit : *order) visit.stage = visit.unit * num_stages / num_units;
  }
  return model;
}

Mesh pipeline_of(int ranks, int data = 1) {
  return Mesh::of({{Axis::kPipeline, ranks}, {Axis::kLocal, data}});
}

TEST(Pipeline, LinesOfTwoStages) {
  const Table table = preset("zero3", {.accumulate = true});
  const auto plans =
      plan_pipeline(table, blocks(2, 2), pipeline_of(2, 2), make_schedule("1f1b", {2, 1, 2}));
  EXPECT_EQ(plans[0].text(), R"(move u0 param all_gather(data)
forward u0 #0
drop u0 param
send u0 act pipeline(+1) #0
move u0 param all_gather(data)
forward u0 #1
drop u0 param
send u0 act pipeline(+1) #1
recv u0 grad pipeline(+1) #0
move u0 param all_gather(data)
backward u0 #0
move u0 grad reduce_scatter(data)
drop u0 param
recv u0 grad pipeline(+1) #1
move u0 param all_gather(data)
backward u0 #1
move u0 grad reduce_scatter(data)
drop u0 param
norm
update u0
)");
  EXPECT_EQ(plans[1].text(), R"(recv u1 act pipeline(-1) #0
move u1 param all_gather(data)
forward u1 #0
drop u1 param
recv u1 act pipeline(-1) #1
move u1 param all_gather(data)
backward u1 #0
move u1 grad reduce_scatter(data)
drop u1 param
send u1 grad pipeline(-1) #0
move u1 param all_gather(data)
forward u1 #1
drop u1 param
move u1 param all_gather(data)
backward u1 #1
move u1 grad reduce_scatter(data)
drop u1 param
send u1 grad pipeline(-1) #1
norm
update u1
)");
  for (const Plan& plan : plans) EXPECT_EQ(parse_plan(plan.text()), plan);
}

// Parameters that are whole in `hold` are gathered once per step.
TEST(Pipeline, GatheredOnce) {
  Table table = preset("zero3", {.accumulate = true});
  table.set(Role::kParam, Phase::kHold, Placement::parse("RR@device:fp32"));
  const auto plans =
      plan_pipeline(table, blocks(4, 2), pipeline_of(2, 2), make_schedule("1f1b", {2, 1, 3}));
  for (const Plan& plan : plans) {
    const std::string text = plan.text();
    size_t num_gathers = 0;
    for (size_t at = 0; (at = text.find("all_gather", at)) != std::string::npos; ++at)
      ++num_gathers;
    EXPECT_EQ(num_gathers, 2U) << text;
  }
}

// With several stages per rank, an action has lines of its own stage alone. A gradient moves to
// where it is updated after the last backward of its stage.
TEST(Pipeline, AnActionHasTheUnitsOfItsStage) {
  const Table table = preset("zero1", {.accumulate = true});
  const ModelDesc model = with_holders(blocks(4, 4), 2);
  const Schedule schedule = make_schedule("interleaved", {2, 2, 2});
  const StagePlan plan = plan_stages(table, part(model, 2, 0), pipeline_of(2, 2), schedule, 0);
  const std::vector<Action>& actions = schedule.ranks[0];
  ASSERT_EQ(plan.actions.size(), actions.size());
  std::map<int, int> backwards, reductions;  // by stage
  for (size_t i = 0; i < actions.size(); ++i) {
    const int stage = actions[i].stage;
    if (!actions[i].forward) ++backwards[stage];
    for (const Step& step : plan.actions[i].steps) {
      if (step.op == Op::kReceive) continue;  // of any later action
      EXPECT_EQ(step.units, std::vector{stage});
      if (step.op != Op::kMove || step.role != Role::kGrad) continue;
      ++reductions[stage];
      EXPECT_EQ(backwards[stage], 2);
    }
  }
  EXPECT_EQ(reductions, (std::map<int, int>{{0, 1}, {2, 1}}));
  EXPECT_EQ(plan.joined(), plan_pipeline(table, blocks(4, 4), pipeline_of(2, 2), schedule)[0]);
}

// Units that enclose others are visited in every stage. A gradient without a visit of its own, and
// a use without a gradient, need no special plan.
TEST(Pipeline, RootsAndTilesAreInStages) {
  ModelDesc model = blocks(3, 3);
  model.units[0].flats.clear();  // the root
  model.forward = {{0, Mark::kBegin, 0}, {1, Mark::kWhole, 0}, {0, Mark::kEnd, 0},
                   {0, Mark::kBegin, 1}, {2, Mark::kWhole, 1}, {0, Mark::kEnd, 1}};
  model.backward = {{0, Mark::kBegin, 1}, {2, Mark::kUse, 1},   {2, Mark::kGradient, 1},
                    {0, Mark::kEnd, 1},   {0, Mark::kBegin, 0}, {1, Mark::kGradient, 0},
                    {0, Mark::kEnd, 0}};
  const auto plans = plan_pipeline(preset("zero3", {.accumulate = true}), model, pipeline_of(2),
                                   make_schedule("1f1b", {2, 1, 1}));
  EXPECT_EQ(plans[1].text(), R"(recv u2 act pipeline(-1) #0
forward u0 begin #0
forward u2 #0
forward u0 end #0
backward u0 begin #0
backward u2 use #0
backward u2 gradient #0
backward u0 end #0
send u2 grad pipeline(-1) #0
norm
update u2
)");
}

TEST(Pipeline, PartsTogetherAreTheModel) {
  const ModelDesc model = blocks(8, 4);
  int64_t numel = 0;
  for (int rank = 0; rank < 2; ++rank) {
    for (const UnitDesc& unit : part(model, 2, rank).units) {
      for (const FlatDesc& flat : unit.flats) numel += flat.numel;
    }
  }
  EXPECT_EQ(numel, 8 * 64);
}

TEST(Pipeline, WhatCannotBeIsNamed) {
  const Table table = preset("ddp", {});
  const Schedule schedule = make_schedule("1f1b", {2, 1, 2});
  const auto told = [&](const ModelDesc& model) {
    return refusal([&] { plan_pipeline(table, model, pipeline_of(2), schedule); });
  };
  EXPECT_EQ(told(blocks(2, 2)), "");
  EXPECT_NE(told(blocks(4, 1)).find("stage 1 of 2 has no units"), std::string::npos);
  EXPECT_NE(told(blocks(4, 3)).find("is in stage 2 of 2"), std::string::npos);
  ModelDesc back = blocks(4, 2);
  std::swap(back.forward[0].stage, back.forward[3].stage);
  EXPECT_NE(told(back).find("is computed after stage 1"), std::string::npos);
  ModelDesc root = blocks(4, 2);
  root.forward.insert(root.forward.begin(), {0, Mark::kBegin, 0});
  root.forward.push_back({0, Mark::kEnd, 0});
  EXPECT_NE(told(root).find("encloses other units"), std::string::npos);
}

}  // namespace
}  // namespace penstock::pipeline_plan_test
