// Whole plans are in tests/plans/*.plan; this file tests the rules that each section follows.
#include "src/plan/planner.h"

#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::planner_test {
namespace {

const Mesh kTwoRanks = Mesh::of({{Axis::kLocal, 2}});
const Mesh kTwoNodes = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});
const Mesh kTwoHalves = Mesh::of({{Axis::kTensor, 2}});

ModelDesc blocks(int num_units) {
  ModelDesc model;
  for (int unit = 0; unit < num_units; ++unit)
    model.units.push_back({.name = "block", .flats = {{1024, Dtype::kBf16}}});
  assume_order(model, false);
  return model;
}

struct SectionCase {
  const char* strategy;
  TableOptions options;
  Section section;
  const char* text;  // plan of a model of one unit on two nodes of two ranks
};

constexpr TableOptions kBf16{.precision = Dtype::kBf16};
constexpr TableOptions kSums{.precision = Dtype::kBf16, .accumulate = true};

TEST(PlannerTest, CachedTokensOfBlocksMoveInForwardsWithoutABackward) {
  const ModelDesc model = blocks(2);
  const std::string rows[][2] = {
      {"SS@host:bf16",
       "forward u0\nmove u1 cache copy(host,device)\nforward u1\n"
       "move u1 cache copy(device,host)\n"},
      {"SS@disk:int8/128",
       "forward u0\nmove u1 cache copy(disk,host); copy(host,device); cast(bf16)\n"
       "forward u1\nmove u1 cache cast(int8/128); copy(device,host); copy(host,disk)\n"},
  };
  for (const auto& [rest, text] : rows) {
    Table table = preset("zero1", kBf16);
    const std::string without = plan_section(table, model, kTwoRanks, Section::kForward).text();
    table.set(Role::kCache, Phase::kRest, Placement::parse(rest));
    EXPECT_EQ(plan_section(table, model, kTwoRanks, Section::kEval).text(), text);
    EXPECT_EQ(plan_section(table, model, kTwoRanks, Section::kForward).text(), without);
    EXPECT_EQ(Table::parse(table.text()), table);
    EXPECT_FALSE(table.uses_disk());
  }
}

TEST(PlannerTest, SectionsOfOneUnit) {
  const SectionCase cases[] = {
      {"zero3", kBf16, Section::kForward,
       "move u0 param all_gather(data)\nforward u0\ndrop u0 param\n"},
      {"hpz", kBf16, Section::kForward,
       "move u0 param all_gather(data)\nforward u0\nmove u0 param slice(local)\n"},
      {"hpz", kBf16, Section::kEval, "move u0 param all_gather(data)\nforward u0\ndrop u0 param\n"},
      {"zero2", kBf16, Section::kForward, "forward u0\n"},
      {"hpz", kBf16, Section::kForwardNext,
       "move u0 param all_gather(local)\nforward u0\nmove u0 param slice(local)\n"},
      {"hpz", kSums, Section::kBackward,
       "move u0 param all_gather(local)\nbackward u0\n"
       "move u0 grad reduce_scatter(data); cast(fp32)\nmove u0 param slice(local)\n"},
      {"hpz", kSums, Section::kBackwardLast,
       "move u0 param all_gather(local)\nbackward u0\n"
       "move u0 grad reduce_scatter(data); cast(fp32)\ndrop u0 param\n"},
      {"ddp", kSums, Section::kBackward, "backward u0\n"},
      {"ddp", kSums, Section::kBackwardLast, "backward u0\nmove u0 grad all_reduce(data)\n"},
      {"zero1", kSums, Section::kBackward, "backward u0\n"},
      {"zero1", kSums, Section::kBackwardLast, "backward u0\nmove u0 grad reduce_scatter(data)\n"},
      {"zero1", kSums, Section::kUpdateEarly,
       "move u0 grad reduce_scatter(data)\nnorm\nupdate u0\n"
       "publish u0 param cast(bf16); all_gather(data)\n"},
      {"zero2", kSums, Section::kUpdateEarly,
       "norm\nupdate u0\npublish u0 param cast(bf16); all_gather(data)\n"},
      {"zero3", {}, Section::kUpdate, "norm\nupdate u0\n"},
      {"ddp", {}, Section::kUpdate, "norm\nupdate u0\n"},
      {"zero3",
       {.precision = Dtype::kBf16, .optim_tier = Tier::kDisk},
       Section::kUpdate,
       "norm\nmove u0 optim copy(disk,host)\nupdate u0\n"
       "publish u0 param cast(bf16); copy(host,device)\nmove u0 optim copy(host,disk)\n"},
  };
  for (const SectionCase& c : cases)
    EXPECT_EQ(plan_section(preset(c.strategy, c.options), blocks(1), kTwoNodes, c.section).text(),
              c.text)
        << c.strategy << " " << section_name(c.section);
}

TEST(PlannerTest, FrozenUnitsMoveParametersOnly) {
  ModelDesc model = blocks(2);
  model.units[1].flats[0].trainable = false;
  const Plan plan = plan_step(preset("zero3", kBf16), model, kTwoRanks, 1);
  int num_frozen_moves = 0;
  for (const Step& step : plan.steps) {
    if (step.units != std::vector<int>{1}) continue;
    num_frozen_moves += step.op == Op::kMove ? 1 : 0;
    EXPECT_NE(step.role, Role::kGrad);
    EXPECT_NE(step.op, Op::kUpdate);
    EXPECT_NE(step.op, Op::kPublish);
  }
  EXPECT_EQ(num_frozen_moves, 2);
}

TEST(PlannerTest, KeptUnitsOnlyCompute) {
  ModelDesc model = blocks(2);
  for (UnitDesc& unit : model.units) unit.flats[0].trainable = false;
  model.units[0].kept = true;
  EXPECT_EQ(plan_section(preset("zero3", kBf16), model, kTwoRanks, Section::kEval).text(),
            "forward u0\nmove u1 param all_gather(data)\nforward u1\ndrop u1 param\n");
}

TEST(PlannerTest, LayersExchangeWhileTheyCompute) {
  ModelDesc model = blocks(2);
  model.units[0].in_backward = {{MoveKind::kAllReduce, Axis::kTensor}};
  model.units[1].in_forward = {{MoveKind::kAllToAll, Axis::kSequence},
                               {MoveKind::kAllReduce, Axis::kTensor}};
  const Table table = preset("ddp", {});
  EXPECT_EQ(plan_section(table, model, kTwoHalves, Section::kForward).text(),
            "forward u0\nforward u1\nmove u1 act all_to_all(sequence)\n"
            "move u1 act all_reduce(tensor)\n");
  EXPECT_EQ(plan_section(table, model, kTwoHalves, Section::kBackward).text(),
            "backward u1\nbackward u0\nmove u0 act all_reduce(tensor)\n");
}

TEST(PlannerTest, OneRankNeedsNoCollectives) {
  for (const std::string& name : preset_names())
    for (const Tier tier : {Tier::kDevice, Tier::kHost})
      for (const Step& step :
           plan_step(preset(name, {.accumulate = true, .optim_tier = tier}), blocks(3), {}, 2)
               .steps)
        for (const Move& move : step.moves)
          EXPECT_FALSE(move.is_collective()) << name << ": " << step.text();
}

TEST(PlannerTest, AStepIsItsSections) {
  const ModelDesc model = blocks(2);
  const Table table = preset("zero3", kSums);
  const Mesh mesh = Mesh::of({{Axis::kLocal, 4}});
  const auto text = [&](Section section) {
    return plan_section(table, model, mesh, section).text();
  };
  EXPECT_EQ(plan_step(table, model, mesh, 2).text(),
            concat("micro 0\n", text(Section::kForward), text(Section::kBackward), "micro 1\n",
                   text(Section::kForward), text(Section::kBackwardLast), text(Section::kUpdate)));
  EXPECT_THROW(plan_step(table, model, mesh, 0), Bug);
}

// Masters are fp32 for any moments, so moves and publishes are the same.
TEST(PlannerTest, TheMomentsDtypeChangesNoStep) {
  for (const std::string& name : preset_names())
    for (const Dtype precision : {Dtype::kFp32, Dtype::kBf16})
      for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kDisk}) {
        TableOptions options{.precision = precision, .optim_tier = tier};
        const Plan plan = plan_step(preset(name, options), blocks(2), kTwoRanks, 1);
        options.moments = Dtype::kBf16;
        EXPECT_EQ(plan_step(preset(name, options), blocks(2), kTwoRanks, 1).text(), plan.text());
      }
}

// A hand-written table: gradients are sharded on the device and summed there over the whole step,
// then updated on the host.
TEST(PlannerTest, HoldAndUpdateMayDifferInTier) {
  Table table = preset("zero2", {});
  table.set(Role::kGrad, Phase::kUpdate, Placement::parse("SS@host:fp32"));
  EXPECT_EQ(plan_section(table, blocks(1), kTwoRanks, Section::kBackwardLast).text(),
            "backward u0\nmove u0 grad reduce_scatter(data)\nmove u0 grad copy(device,host)\n");
}

}  // namespace
}  // namespace penstock::planner_test
