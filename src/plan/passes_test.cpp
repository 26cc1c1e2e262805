// tests/plans/interpreter_test.cpp shows that passes never change results.
#include "src/plan/passes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "src/base/text.h"
#include "src/plan/cost/simulator.h"
#include "src/plan/planner.h"

namespace penstock::passes_test {
namespace {

// Units of 100 bf16 parameters: 200 bytes each.
ModelDesc blocks(int num_units) {
  ModelDesc model;
  for (int unit = 0; unit < num_units; ++unit)
    model.units.push_back({.name = "block", .flats = {{100, Dtype::kBf16}}});
  assume_order(model, false);
  return model;
}

struct PassCase {
  const char* name;
  int64_t bytes;
  const char *before, *after;
};

constexpr const char* kForward =
    "micro 0\n"
    "move u0 param all_gather(data)\nforward u0\ndrop u0 param\n"
    "move u1 param all_gather(data)\nforward u1\ndrop u1 param\n"
    "move u2 param all_gather(data)\nforward u2\ndrop u2 param\n";

TEST(PrefetchTest, MovesGoUpWithinTheBudget) {
  const PassCase cases[] = {
      {"no budget", 0, kForward, kForward},
      {"less than a unit", 199, kForward, kForward},
      {"one unit", 200, kForward,
       "micro 0\n"
       "move u0 param all_gather(data)\nmove u1 param all_gather(data)\nforward u0\n"
       "drop u0 param\nmove u2 param all_gather(data)\nforward u1\ndrop u1 param\n"
       "forward u2\ndrop u2 param\n"},
      {"two units", 400, kForward,
       "micro 0\n"
       "move u0 param all_gather(data)\nmove u1 param all_gather(data)\n"
       "move u2 param all_gather(data)\nforward u0\ndrop u0 param\nforward u1\ndrop u1 param\n"
       "forward u2\ndrop u2 param\n"},
      {"over gradients and sums, not over its own steps", 1000,
       "backward u1\nmove u1 grad reduce_scatter(data)\ndrop u1 param\n"
       "move u0 act all_reduce(tensor)\ndrop u0 param\nbackward u2\n"
       "move u0 param all_gather(data)\nbackward u0\n",
       "backward u1\nmove u1 grad reduce_scatter(data)\ndrop u1 param\n"
       "move u0 act all_reduce(tensor)\ndrop u0 param\nmove u0 param all_gather(data)\n"
       "backward u2\nbackward u0\n"},
      {"over another unit's slice", 1000,
       "move u0 param all_gather(data)\nforward u0\nmove u0 param slice(local)\n"
       "move u1 param all_gather(data)\nforward u1\nmove u1 param slice(local)\n",
       "move u0 param all_gather(data)\nmove u1 param all_gather(data)\nforward u0\n"
       "move u0 param slice(local)\nforward u1\nmove u1 param slice(local)\n"},
      {"not over a micro line", 1000, "backward u1\nmicro 1\nmove u0 param all_gather(data)\n",
       "backward u1\nmicro 1\nmove u0 param all_gather(data)\n"},
      {"not over an update", 1000,
       "backward u1\nnorm\nupdate u1\nmove u0 param all_gather(data)\nforward u0\n",
       "backward u1\nnorm\nupdate u1\nmove u0 param all_gather(data)\nforward u0\n"},
      {"not without a compute step to hide it", 1000,
       "drop u1 param\nmove u0 param copy(host,device)\nforward u0\n",
       "drop u1 param\nmove u0 param copy(host,device)\nforward u0\n"},
  };
  for (const PassCase& c : cases)
    EXPECT_EQ(prefetch(parse_plan(c.before), blocks(3), c.bytes).text(), c.after) << c.name;
}

TEST(FuseTest, NeighboursShareACollective) {
  constexpr const char* kBackward =
      "backward u2\nmove u2 grad reduce_scatter(data)\ndrop u2 param\n"
      "backward u1\nmove u1 grad reduce_scatter(data)\ndrop u1 param\n"
      "backward u0\nmove u0 grad reduce_scatter(data)\ndrop u0 param\nnorm\n";
  const PassCase cases[] = {
      {"no bucket", 0, kForward, kForward},
      {"together must be smaller", 400, kForward, kForward},
      {"two units", 401, kForward,
       "micro 0\nmove u0+u1 param all_gather(data)\nforward u0\ndrop u0 param\nforward u1\n"
       "drop u1 param\nmove u2 param all_gather(data)\nforward u2\ndrop u2 param\n"},
      {"gradients join the later", 1000, kBackward,
       "backward u2\ndrop u2 param\nbackward u1\ndrop u1 param\nbackward u0\n"
       "move u2+u1+u0 grad reduce_scatter(data)\ndrop u0 param\nnorm\n"},
      {"publishes join the later", 1000,
       "update u0\npublish u0 param all_gather(data)\nupdate u1\n"
       "publish u1 param all_gather(data)\n",
       "update u0\nupdate u1\npublish u0+u1 param all_gather(data)\n"},
      {"a publish not over what takes its masters away", 1000,
       "update u0\npublish u0 param all_gather(data)\nmove u0 optim copy(device,host)\n"
       "update u1\npublish u1 param all_gather(data)\nmove u1 optim copy(device,host)\n",
       "update u0\npublish u0 param all_gather(data)\nmove u0 optim copy(device,host)\n"
       "update u1\npublish u1 param all_gather(data)\nmove u1 optim copy(device,host)\n"},
      {"not over a micro line", 1000,
       "move u1 grad reduce_scatter(data)\nmicro 1\nmove u0 grad reduce_scatter(data)\n",
       "move u1 grad reduce_scatter(data)\nmicro 1\nmove u0 grad reduce_scatter(data)\n"},
      {"not over the norm", 1000,
       "move u1 grad reduce_scatter(data)\nnorm\nmove u0 grad reduce_scatter(data)\n",
       "move u1 grad reduce_scatter(data)\nnorm\nmove u0 grad reduce_scatter(data)\n"},
      {"not over its own backward", 1000,
       "move u1 grad reduce_scatter(data)\nbackward u1\nmove u0 grad reduce_scatter(data)\n",
       "move u1 grad reduce_scatter(data)\nbackward u1\nmove u0 grad reduce_scatter(data)\n"},
      {"not over its own drop", 1000,
       "move u0 param all_gather(data)\nforward u0\ndrop u1 param\nmove u1 param "
       "all_gather(data)\n",
       "move u0 param all_gather(data)\nforward u0\ndrop u1 param\nmove u1 param "
       "all_gather(data)\n"},
      {"only the same moves", 1000,
       "move u0 param all_gather(data)\nmove u1 param all_gather(local)\n",
       "move u0 param all_gather(data)\nmove u1 param all_gather(local)\n"},
      {"not what needs no collective", 1000,
       "move u0 param copy(host,device)\nmove u1 param copy(host,device)\n",
       "move u0 param copy(host,device)\nmove u1 param copy(host,device)\n"},
      {"not activations", 1000, "move u0 act all_reduce(tensor)\nmove u1 act all_reduce(tensor)\n",
       "move u0 act all_reduce(tensor)\nmove u1 act all_reduce(tensor)\n"},
  };
  for (const PassCase& c : cases)
    EXPECT_EQ(fuse(parse_plan(c.before), blocks(3), c.bytes).text(), c.after) << c.name;
}

TEST(ReadAheadTest, ReadsStartOneUnitEarly) {
  const PassCase cases[] = {
      {"optimizer state", 0,
       "norm\nmove u0 optim copy(disk,host)\nupdate u0\npublish u0 param cast(bf16)\n"
       "move u0 optim copy(host,disk)\nmove u1 optim copy(disk,host)\nupdate u1\n"
       "move u2 optim copy(disk,host)\nupdate u2\n",
       "move u0 optim copy(disk,host)\nmove u1 optim copy(disk,host)\nnorm\nupdate u0\n"
       "publish u0 param cast(bf16)\nmove u0 optim copy(host,disk)\n"
       "move u2 optim copy(disk,host)\nupdate u1\nupdate u2\n"},
      {"inputs, over the moves of others", 0,
       "micro 0\nforward u1\nmove u1 act copy(device,host)\n"
       "move u1 act copy(host,device)\nbackward u1\nmove u1 grad reduce_scatter(data)\n"
       "drop u1 param\nmove u0 act copy(host,device)\nmove u0 param all_gather(data)\n"
       "backward u0\n",
       "micro 0\nforward u1\nmove u1 act copy(device,host)\n"
       "move u1 act copy(host,device)\nmove u0 act copy(host,device)\nbackward u1\n"
       "move u1 grad reduce_scatter(data)\ndrop u1 param\nmove u0 param all_gather(data)\n"
       "backward u0\n"},
      {"cached tokens", 0,
       "forward u1\nmove u1 cache copy(device,host)\nmove u2 cache copy(host,device)\n"
       "forward u2\nmove u2 cache copy(device,host)\nmove u1 cache copy(host,device)\n"
       "forward u1\nforward u3\n",
       "move u2 cache copy(host,device)\nforward u1\nmove u1 cache copy(device,host)\n"
       "move u1 cache copy(host,device)\nforward u2\nmove u2 cache copy(device,host)\n"
       "forward u1\nforward u3\n"},
      {"not sums over tensor ranks", 0, "backward u1\nmove u1 act all_reduce(tensor)\n",
       "backward u1\nmove u1 act all_reduce(tensor)\n"},
  };
  for (const PassCase& c : cases)
    EXPECT_EQ(read_ahead(parse_plan(c.before)).text(), c.after) << c.name;
}

TEST(ReadAheadTest, InputsHoldUpNoParameters) {
  const Mesh mesh = Mesh::of({{Axis::kLocal, 4}});
  ModelDesc model = blocks(4);
  const auto plan = [&](Tier tier) {
    const Table table = preset("zero3", {.act_tier = tier});
    return fuse(prefetch(read_ahead(plan_step(table, model, mesh, 1)), model, 1000), model, 400);
  };
  const Plan without = plan(Tier::kDevice);
  for (UnitDesc& unit : model.units) unit.recomputed = true;
  Plan with = plan(Tier::kDisk);
  EXPECT_NE(with, without);
  std::erase_if(with.steps, [](const Step& step) { return step.role == Role::kAct; });
  EXPECT_EQ(with, without);
}

TEST(PrefetchTest, PeaksGrowByNoMoreThanTheBudget) {
  const Mesh mesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});
  const ModelDesc model = blocks(6);
  for (const char* name : {"zero3", "hpz", "mics"}) {
    const Table table = preset(name, {.precision = Dtype::kBf16});
    const Plan plan = plan_step(table, model, mesh, 2);
    const int64_t plain = simulate(plan, table, model, mesh).tier[0].param;
    for (const int64_t budget : {0, 100, 200, 500, 900, 1 << 20}) {
      const Plan early = prefetch(plan, model, budget);
      EXPECT_LE(simulate(early, table, model, mesh).tier[0].param, plain + budget) << name;
      EXPECT_EQ(prefetch(early, model, 0), early) << name;
      EXPECT_EQ(early == plan, budget < 200) << name << " " << budget;
    }
  }
}

TEST(SumTest, GradientsAreCastBeforeTheirFirstSum) {
  struct Row {
    const char* strategy;
    Dtype precision;
    const char* backward;  // moves of a gradient after the last backward
  };
  const Row rows[] = {
      {"zero2", Dtype::kFp32, "reduce_scatter(data)"},
      {"zero2", Dtype::kBf16, "cast(fp32); reduce_scatter(data); cast(bf16)"},
      {"ddp", Dtype::kFp16, "cast(fp32); all_reduce(data); cast(fp16)"},
      {"mics", Dtype::kBf16, "cast(fp32); reduce_scatter(local); all_reduce(node); cast(bf16)"},
  };
  const Mesh mesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});
  for (const Row& row : rows) {
    const Table table = preset(row.strategy, {.precision = row.precision}).on(mesh);
    ModelDesc model = blocks(1);
    model.units[0].flats[0].dtype = row.precision;
    const Plan plan = plan_section(table, model, mesh, Section::kBackwardLast);
    const Plan wide = sum_as_fp32(plan, table);
    const std::string wanted = concat("u0 grad ", row.backward);
    EXPECT_NE(wide.text().find(wanted), std::string::npos) << row.strategy << "\n" << wide.text();
    EXPECT_EQ(sum_as_fp32(wide, table), wide) << row.strategy;
    EXPECT_EQ(wide == plan, row.precision == Dtype::kFp32);
  }
}

TEST(SumTest, ARingIsForNodesOfManyRanks) {
  const auto less = [](int node, int local, const char* strategy = "zero2") {
    const Mesh mesh = Mesh::of({{Axis::kNode, node}, {Axis::kLocal, local}});
    const Table table = preset(strategy, {.precision = Dtype::kBf16});
    return ring_sends_less(mesh, table.on(mesh));
  };
  EXPECT_FALSE(less(1, 8));
  EXPECT_FALSE(less(8, 1));
  EXPECT_FALSE(less(2, 2));
  EXPECT_TRUE(less(2, 8));
  EXPECT_TRUE(less(16, 4));
  EXPECT_TRUE(less(2, 8, "ddp"));
  EXPECT_TRUE(less(2, 8, "hpz"));
  EXPECT_FALSE(less(2, 8, "mics"));  // sums inside the node first, so the second sum is in fp32
}

TEST(PassesTest, StepsAreOnlyReordered) {
  const Mesh mesh = Mesh::of({{Axis::kLocal, 4}});
  const ModelDesc model = blocks(4);
  const Table table = preset("zero3", {.precision = Dtype::kBf16, .param_tier = Tier::kHost});
  const Plan plan = plan_step(table, model, mesh, 2);
  const auto sorted = [](const Plan& plan) {
    auto lines = split(plan.text(), '\n');
    std::sort(lines.begin(), lines.end());
    return lines;
  };
  EXPECT_EQ(sorted(prefetch(plan, model, 500)), sorted(plan));
  EXPECT_EQ(fuse(plan, model, 0), plan);
}

TEST(ReadAheadTest, StartsBeforeTheUpdateOfTheUnitBefore) {
  const Plan plan = parse_plan(
      "backward u0 end\nnorm\n"
      "move u0 optim copy(disk,host)\nmove u0 grad copy(disk,host)\nupdate u0\n"
      "move u0 optim copy(host,disk)\n"
      "move u1 optim copy(disk,host)\nmove u1 grad copy(disk,host)\nupdate u1\n"
      "move u1 optim copy(host,disk)\n");
  EXPECT_EQ(read_ahead(plan).text(),
            "backward u0 end\nmove u0 optim copy(disk,host)\nmove u1 optim copy(disk,host)\nnorm\n"
            "move u0 grad copy(disk,host)\nmove u1 grad copy(disk,host)\nupdate u0\n"
            "move u0 optim copy(host,disk)\nupdate u1\nmove u1 optim copy(host,disk)\n");
}

}  // namespace
}  // namespace penstock::passes_test
