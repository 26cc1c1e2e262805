#include "src/plan/cost/pipeline_timeline.h"

#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/plan/passes.h"
#include "src/plan/pipeline_plan.h"
#include "src/plan/planner.h"

namespace penstock::pipeline_timeline_test {
namespace {

constexpr int64_t kNumel = 1024;  // per block

ModelDesc blocks(int num_units, int num_stages) {
  ModelDesc model;
  for (int unit = 0; unit < num_units; ++unit) {
    model.units.push_back({.name = "block", .flats = {{kNumel, Dtype::kBf16}}});
  }
  assume_order(model, false);
  for (auto* order : {&model.forward, &model.backward}) {
    for (Visit& visit : *order) visit.stage = visit.unit * num_stages / num_units;
  }
  return model;
}

// A forward of a block takes one second; bytes take no time.
Machine computing() {
  const double never = 1e30;
  return {2.0 * kNumel, never, never, never, never, never, never};
}

struct Setting {
  const char* schedule;
  int virtual_stages;
  int micro;
};

Timeline timeline_of(const Table& table, const Mesh& mesh, const Setting& setting,
                     const Machine& machine, int num_units, int64_t boundary_bytes = 0) {
  const int ranks = mesh.size(Axis::kPipeline);
  ModelDesc model = blocks(num_units, ranks * setting.virtual_stages);
  model.boundary_bytes = boundary_bytes;
  const Schedule schedule =
      make_schedule(setting.schedule, {ranks, setting.virtual_stages, setting.micro});
  std::vector<Plan> plans = plan_pipeline(table, model, mesh, schedule);
  for (Plan& plan : plans) plan = prefetch(plan, model, 1 << 30);
  return replay(plans, table, model, mesh, machine, work_of(model, 1));
}

Table bf16(const char* strategy) {
  return preset(strategy, {.precision = Dtype::kBf16, .accumulate = true});
}

// 4 ranks and 8 micro-batches. Expected numbers are those of torch's own schedules, with a forward
// of one time unit for a rank's part of the model and a backward of two.
TEST(Timeline, BubblesAndWhatIsHeld) {
  const Mesh mesh = Mesh::of({{Axis::kPipeline, 4}});
  const Timeline gpipe = timeline_of(bf16("ddp"), mesh, {"gpipe", 1, 8}, computing(), 4);
  const Timeline one = timeline_of(bf16("ddp"), mesh, {"1f1b", 1, 8}, computing(), 4);
  const Timeline two = timeline_of(bf16("ddp"), mesh, {"interleaved", 2, 8}, computing(), 8);
  const Timeline split = timeline_of(bf16("ddp"), mesh, {"zero_bubble", 1, 8}, computing(), 4);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_NEAR(split.ranks[rank].idle, 3, 1e-9);
    EXPECT_NEAR(split.ranks[rank].busy, 24, 1e-9);
    EXPECT_NEAR(split.ranks[rank].most_held, 4, 1e-9);
    EXPECT_NEAR(gpipe.ranks[rank].idle, 9, 1e-9);
    EXPECT_NEAR(one.ranks[rank].idle, 9, 1e-9);
    EXPECT_NEAR(one.ranks[rank].busy, 24, 1e-9);
    EXPECT_NEAR(two.ranks[rank].idle, 2 * 4.5, 1e-9);  // for twice the work
    EXPECT_NEAR(two.ranks[rank].busy, 48, 1e-9);
    EXPECT_NEAR(gpipe.ranks[rank].most_held, 8, 1e-9);
    EXPECT_NEAR(one.ranks[rank].most_held, 4 - rank, 1e-9);
  }
  EXPECT_NEAR(two.ranks[0].most_held, 5.5, 1e-9);
  EXPECT_NEAR(one.bubble(), 9.0 / 24, 1e-9);
}

// A line takes the time of its bytes. If lanes and computation share cores, computation waits for
// the line.
TEST(Timeline, SecondsOfLines) {
  const Mesh mesh = Mesh::of({{Axis::kLocal, 2}});
  ModelDesc model = blocks(2, 1);
  const Plan plan = plan_step(bf16("zero3"), model, mesh, 1);
  Machine machine = computing();
  machine.local = kNumel;  // half of a block in bf16 takes one second
  const Timeline apart = replay({plan}, bf16("zero3"), model, mesh, machine, work_of(model, 1));
  machine.overlap = 0.0;
  const Timeline shared = replay({plan}, bf16("zero3"), model, mesh, machine, work_of(model, 1));
  double computed = 0.0, moved = 0.0;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    EXPECT_EQ(apart.ranks[0].lines[i], shared.ranks[0].lines[i]) << step.text();
    (step.is_compute() ? computed : moved) += apart.ranks[0].lines[i];
    if (step.is_compute()) {
      EXPECT_NEAR(apart.ranks[0].lines[i], step.op == Op::kForward ? 1.0 : 2.0, 1e-9);
    }
  }
  EXPECT_NEAR(computed, 6.0, 1e-9);
  EXPECT_GT(moved, 5.0);  // each block is gathered twice and reduced once
  EXPECT_LT(apart.step, computed + moved);
  EXPECT_GE(shared.step, computed + moved - 1e-6);
}

TEST(Timeline, BubbleOfStages) {
  const std::vector<StageSeconds> even(4, {1, 2});
  EXPECT_NEAR(simulated_bubble("1f1b", 4, 8, even), 9.0 / 24, 1e-9);
  EXPECT_NEAR(simulated_bubble("gpipe", 4, 8, even), 9.0 / 24, 1e-9);
  EXPECT_NEAR(simulated_bubble("interleaved", 2, 8, even), 3.0 / 48, 1e-9);
  EXPECT_NEAR(simulated_bubble("zero_bubble", 4, 8, even), 3.0 / 24, 1e-9);
  // Stages of 1 + 2 and 2 + 4 seconds. The slower stage waits for the first forward. After it, only
  // the first stage's backward of the last micro-batch runs.
  EXPECT_NEAR(simulated_bubble("1f1b", 2, 4, {{1, 2}, {2, 4}}), (15.0 + 3) / 36, 1e-9);
  EXPECT_THROW(simulated_bubble("1f1b", 3, 4, even), ConfigError);
  EXPECT_THROW(simulated_bubble("zigzag", 2, 4, even), ConfigError);
}

// Bytes per rank and step: parameters and gradients in bf16, once or for every micro-batch.
TEST(Timeline, TrafficOfZeroInAPipeline) {
  const int micro = 8, data = 2;
  const Mesh mesh = Mesh::of({{Axis::kPipeline, 2}, {Axis::kLocal, data}});
  const int64_t params = 4 * kNumel * 2 / 2;  // bytes of a stage, in bf16, over data
  const auto sent = [&](const Table& table) {
    return timeline_of(table, mesh, {"1f1b", 1, micro}, computing(), 8).ranks[0].sent.at("local");
  };
  Table whole = bf16("zero3");
  whole.set(Role::kParam, Phase::kHold, Placement::parse("RR@device:bf16"));
  EXPECT_EQ(sent(bf16("zero1")), params + 2 * params);  // sums over micro-batches, in fp32
  EXPECT_EQ(sent(bf16("zero2")), params + micro * params);
  EXPECT_EQ(sent(bf16("zero3")), 2 * micro * params + micro * params);
  EXPECT_EQ(sent(whole), params + micro * params);
}

// Sending takes time, which overlaps with computing.
TEST(Timeline, TransfersThatHideAndThatDoNot) {
  const Mesh mesh = Mesh::of({{Axis::kPipeline, 4}});
  Machine machine = computing();
  machine.node = 1000;
  const auto passes = [&](int64_t bytes) {
    return timeline_of(bf16("ddp"), mesh, {"1f1b", 1, 16}, machine, 4, bytes).passes;
  };
  const double none = passes(0), little = passes(100), much = passes(4000);
  EXPECT_NEAR(none, 16 * 3 + 9, 1e-9);
  EXPECT_GT(little, none);
  EXPECT_LT(little, none + 16 * 2 * 0.1 + 3 * 2 * 0.1);
  EXPECT_GT(much, 16 * 4);  // the links are the slowest lane: 4 s per message
  // The gathers of each use take longer than the use.
  const Mesh wide = Mesh::of({{Axis::kPipeline, 2}, {Axis::kLocal, 2}});
  Machine slow = computing();
  slow.local = kNumel / 4.0;
  const Timeline fast = timeline_of(bf16("zero3"), wide, {"1f1b", 1, 4}, computing(), 4);
  const Timeline late = timeline_of(bf16("zero3"), wide, {"1f1b", 1, 4}, slow, 4);
  EXPECT_GT(late.passes, 1.5 * fast.passes);
}

// A layer on 4 tensor ranks. Its first half has a sum in backward, and its second half has a sum in
// forward. A sum of 200 bytes sends 2 x 3/4 of these bytes, which takes 3 s here.
constexpr LayerExchange kSum = {MoveKind::kAllReduce, Axis::kTensor, 300};
TEST(Timeline, KernelsSumsAndWhatIsComputedAgain) {
  const Mesh mesh = Mesh::of({{Axis::kTensor, 4}});
  Machine machine = computing();
  machine.flops = 10;
  machine.device_memory = 5;
  machine.local = 100;
  ModelDesc model = blocks(2, 1);
  model.units[0].in_backward = {kSum};
  model.units[1].in_forward = {kSum};
  const std::vector<UnitWork> work(2, {{20, 5}, {40, 15}});
  const auto timeline = [&](int micro) {
    const auto plans =
        plan_pipeline(bf16("ddp"), model, mesh, make_schedule("1f1b", {1, 1, micro}));
    return replay(plans, bf16("ddp"), model, mesh, machine, work);
  };
  // Forward: two units of 20 / 10 + 5 / 5 s, and a sum. Backward: two units of 40 / 10 + 15 / 5 s,
  // and a sum.
  EXPECT_NEAR(timeline(1).passes, 2 * 3 + 3 + 2 * 7 + 3, 1e-9);
  EXPECT_NEAR(timeline(1).ranks[0].busy, 26, 1e-9);
  EXPECT_NEAR(timeline(2).passes, 2 * 26, 1e-9);
  EXPECT_EQ(timeline(2).ranks[0].sent.at("local"), 2 * 2 * 300);
  for (UnitDesc& unit : model.units) unit.recomputed = true;
  model.units[1].in_backward = {kSum};  // the forward's sum, again
  EXPECT_NEAR(timeline(1).passes, 26 + 2 * 3 + 3, 1e-9);
}

TEST(Timeline, WorkOfParameters) {
  ModelDesc model = blocks(2, 1);
  model.units[1].flats[0].trainable = false;
  const std::vector<UnitWork> work = work_of(model, 3);
  EXPECT_EQ(work[0].forward.flops, 2 * 3 * kNumel);
  EXPECT_EQ(work[0].backward.flops, 4 * 3 * kNumel);
  EXPECT_EQ(work[1].backward.flops, 2 * 3 * kNumel);
}

TEST(Timeline, WhatNeverComesIsNamed) {
  const Mesh mesh = Mesh::of({{Axis::kPipeline, 2}});
  const ModelDesc model = blocks(2, 2);
  std::vector<Plan> plans =
      plan_pipeline(bf16("ddp"), model, mesh, make_schedule("1f1b", {2, 1, 2}));
  std::erase_if(plans[0].steps,
                [](const Step& step) { return step.op == Op::kSend && step.micro == 1; });
  try {
    replay(plans, bf16("ddp"), model, mesh, computing(), work_of(model, 1));
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("1 at 'recv u1 act pipeline(-1) #1'"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace penstock::pipeline_timeline_test
