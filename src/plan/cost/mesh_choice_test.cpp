#include "src/plan/cost/mesh_choice.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/cost/strategy_choice.h"
#include "src/plan/pipeline_schedule.h"

namespace penstock::mesh_choice_test {
namespace {

// Returns a model of the paper's size (arXiv:2104.04473, table 1), with 12 h^2 parameters per
// layer, an embedding and a head.
ModelDesc gpt_of(const TransformerShape& shape) {
  ModelDesc model;
  const auto add = [&](const std::string& name, int64_t numel, bool block) {
    UnitDesc unit{.name = name, .flats = {}, .block = block};
    if (numel > 0) unit.flats = {{numel, Dtype::kBf16}};
    model.units.push_back(unit);
  };
  add("the root", 0, false);
  add("embedding", shape.vocabulary * shape.hidden, false);
  for (int i = 0; i < shape.layers; ++i) add("block", 12 * shape.hidden * shape.hidden, true);
  add("head", shape.vocabulary * shape.hidden, false);
  assume_order(model, true);
  return model;
}

MeshQuestion question_of(const TransformerShape& shape, int nodes, int per_node, int64_t batch) {
  MeshQuestion question;
  question.shape = shape;
  question.nodes = nodes;
  question.per_node = per_node;
  question.batch = batch;
  question.asked.world_size = nodes * per_node;
  return question;
}

constexpr TransformerShape kSmall = {8, 512, 8, 128, 0};

TEST(MeshChoice, OneStageAndOneTensorRankIsWhatThePlanReports) {
  const ModelDesc model = gpt_of(kSmall);
  int compared = 0;
  for (const MeshAlternative& one : mesh_alternatives(question_of(kSmall, 2, 4, 64), model)) {
    if (one.tensor * one.pipeline > 1 || one.recompute) continue;
    Question question{question_of(kSmall, 2, 4, 64).asked, {one.state.strategy}, false};
    question.asked.config.mesh.data = 8;
    question.asked.config.mesh.node = 2;
    question.asked.config.batch.accumulate = 8;
    question.asked.tokens = 8 * 128;
    const Alternative same = alternatives(question, model).front();
    EXPECT_EQ(one.state.device, same.device) << one.config();
    EXPECT_DOUBLE_EQ(one.seconds, same.seconds) << one.config();
    ++compared;
  }
  EXPECT_EQ(compared, 4);  // strategies
}

// The cost of messages ranges from nearly nothing to more than that of computing.
TEST(MeshChoice, BubbleAndMessagesAreThoseOfTheSchedule) {
  for (const double link : {1e8, 1e9, 1e11}) {
    MeshQuestion question =
        question_of(kSmall, 8, 1, 64);  // one rank per node: all messages cross nodes
    question.micro = {1, 2, 4};
    question.asked.machine.node = link;
    int compared = 0;
    for (const MeshAlternative& one : mesh_alternatives(question, gpt_of(kSmall))) {
      if (one.pipeline == 1) continue;
      const int v = one.virtual_stages, m = static_cast<int>(one.accumulate);
      const double forward = one.state.forward / m / v, backward = one.state.backward / m / v;
      const double message = 2.0 * 512 * 128 * static_cast<double>(one.micro) / link;
      const Schedule schedule = make_schedule(v > 1 ? "interleaved" : "1f1b", {one.pipeline, v, m});
      const double busy = one.state.forward + one.state.backward;
      EXPECT_NEAR((busy + one.bubble) / replay(schedule, forward, backward).makespan, 1, 1e-9);
      const Replay whole = replay(schedule, forward, backward, message);
      EXPECT_NEAR((busy + one.bubble + one.messages) / whole.makespan, 1, 1e-6) << one.config();
      ++compared;
    }
    EXPECT_GE(compared, 50);
  }
}

// Without exchanges over data ranks, a stage takes as long as its products and its sums.
TEST(MeshChoice, AStageTakesAsLongAsItsProductsItsForwardsAgainAndItsSums) {
  const MeshQuestion question = question_of(kSmall, 1, 4, 16);
  const Machine& machine = question.asked.machine;
  int compared = 0;
  for (const MeshAlternative& one : mesh_alternatives(question, gpt_of(kSmall))) {
    if (one.data > 1 || one.virtual_stages > 1) continue;
    const double micros = static_cast<double>(one.accumulate), size = one.tensor;
    const double values = 2.0 * 512 * 128 * static_cast<double>(one.micro);
    const double layers = 8.0 / one.pipeline, times = one.recompute ? 3 : 2;
    const double sums = times * layers * micros * 2 * 2 * (size - 1) / size * values;
    EXPECT_NEAR(one.sums, sums / machine.local, 1e-9 + 1e-6 * one.sums) << one.config();
    const double again = 2.0 * layers * 12 * 512 * 512 / size * 16 * 128 / machine.flops;
    EXPECT_NEAR(one.again, one.recompute ? again : 0, 1e-12) << one.config();
    EXPECT_NEAR(one.state.forward + one.state.backward, one.compute + one.again + one.sums,
                1e-9 * one.seconds)
        << one.config();
    ++compared;
  }
  EXPECT_EQ(compared, 6);  // tensor ranks 1, 2, 4 with and without recomputation
}

TEST(MeshChoice, StagesHaveAllBlocksAndTensorRanksAShare) {
  const ModelDesc model = gpt_of({8, 512, 8, 128, 1024});
  const auto numel = [](const ModelDesc& part) {
    int64_t sum = 0;
    for (const UnitDesc& unit : part.units) {
      for (const FlatDesc& flat : unit.flats) sum += flat.numel;
    }
    return sum;
  };
  int64_t sum = 0;
  for (int rank = 0; rank < 4; ++rank) sum += numel(stage_of(model, 1, 4, rank, 1));
  EXPECT_EQ(sum, numel(model));
  EXPECT_EQ(numel(stage_of(model, 1, 4, 1, 1)), 2 * 12 * 512 * 512);
  EXPECT_EQ(numel(stage_of(model, 2, 4, 1, 1)), 12 * 512 * 512);
  EXPECT_EQ(numel(stage_of(model, 1, 4, 0, 1)), (2 * 12 * 512 + 1024) * 512);
}

TEST(MeshChoice, WhatDoesNotFitSaysByHowMuch) {
  MeshQuestion question = question_of(kSmall, 1, 4, 4);
  question.asked.room.device = 1 << 20;
  const auto all = mesh_alternatives(question, gpt_of(kSmall));
  EXPECT_FALSE(all.front().fits);
  EXPECT_EQ(all.front().excess, all.front().state.device + all.front().activations - (1 << 20));
  for (const MeshAlternative& one : all) EXPECT_GE(one.excess, all.front().excess);
  const std::string text = mesh_text(question, all);
  EXPECT_NE(text.find("nothing fits; the nearest: {\"mesh\""), std::string::npos) << text;
  EXPECT_NE(text.find("does not fit: device"), std::string::npos) << text;
}

TEST(MeshChoice, HeadsAndTheNodeLimitTensorRanks) {
  TransformerShape shape = kSmall;
  shape.heads = 2;
  for (const auto& one : mesh_alternatives(question_of(shape, 2, 8, 64), gpt_of(shape))) {
    EXPECT_LE(one.tensor, 2);
    EXPECT_LE(one.pipeline, 8);
    EXPECT_EQ(one.tensor * one.pipeline * one.data, 16);
    EXPECT_EQ(one.micro * one.accumulate * one.data, 64);
  }
  EXPECT_THROW(mesh_alternatives(question_of(shape, 1, 8, 1), gpt_of({1, 64, 1, 8, 0})),
               ConfigError);
}

// Seconds per step from published_test.cpp's table: FLOPs of arXiv:2104.04473, equation 3, divided
// by the simulated MFU. With the same rate of multiplications, the proposals are faster: they do
// not count reads and writes between multiplications.
struct Published {
  TransformerShape shape;
  int nodes, tensor, pipeline, virtual_stages;
  int64_t batch, micro;
  double mfu;
};
TEST(MeshChoice, PublishedRunsAreLittleFasterThanTheirReplayAndNoFasterThanTheBest) {
  const Published kRuns[] = {{{128, 25600, 160, 2048, 51200}, 384, 8, 64, 1, 3072, 1, 0.489},
                             {{80, 12288, 96, 2048, 51200}, 192, 8, 8, 2, 2304, 2, 0.481}};
  for (const Published& run : kRuns) {
    MeshQuestion question = question_of(run.shape, run.nodes, 8, run.batch);
    question.micro = {run.micro};
    question.asked.machine.flops = 0.678 * 312e12;
    question.asked.machine.node = 25e9;
    question.asked.machine.device_memory = 2.039e12;
    question.asked.room.device = int64_t{80} << 30;
    const auto all = mesh_alternatives(question, gpt_of(run.shape));
    const auto l = static_cast<double>(run.shape.layers), h = static_cast<double>(run.shape.hidden);
    const double flops = 96.0 * static_cast<double>(run.batch) * 2048 * l * h * h *
                         (1 + 2048 / (6 * h) + 51200 / (16 * l * h));
    const double seconds = flops / (312e12 * run.mfu * run.nodes * 8);
    const auto same = std::find_if(all.begin(), all.end(), [&](const MeshAlternative& one) {
      return one.tensor == run.tensor && one.pipeline == run.pipeline && one.recompute &&
             one.virtual_stages == run.virtual_stages && one.state.strategy == "ddp";
    });
    ASSERT_NE(same, all.end());
    EXPECT_LT(same->seconds / seconds, 1) << same->why();
    EXPECT_GT(same->seconds / seconds, 0.82) << same->why();
    EXPECT_TRUE(all.front().fits);
    EXPECT_LE(all.front().seconds, same->seconds) << all.front().why();
  }
}

}  // namespace
}  // namespace penstock::mesh_choice_test
