#include "src/plan/plan.h"

#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::plan_test {
namespace {

constexpr const char* kText =
    "micro 0\n"
    "move u1 param copy(host,device); all_gather(data)\n"
    "forward u1\n"
    "move u1 act all_reduce(tensor)\n"
    "drop u1 param\n"
    "forward u0 begin\n"
    "backward u0 end\n"
    "move u3+u2 grad reduce_scatter(local); all_reduce(node); cast(fp32)\n"
    "norm\n"
    "move u1 optim copy(disk,host)\n"
    "update u1\n"
    "publish u1 param cast(bf16); all_gather(data)\n";

TEST(PlanTest, ChunksParse) {
  const Step step = parse_step("move u12[1/3] optim copy(disk,host)");
  EXPECT_EQ(step.units, std::vector<int>{12});
  EXPECT_EQ(step.chunk, (Chunk{1, 3}));
  EXPECT_EQ(step.text(), "move u12[1/3] optim copy(disk,host)");
}

TEST(PlanTest, ChunksCoverAFlatInWholeGrains) {
  for (const int64_t numel : {1L, 2048L, 2049L, 100000L, 1L << 20}) {
    for (const int count : {1, 2, 7, 60}) {
      int64_t at = 0;
      for (int index = 0; index < count; ++index) {
        const auto [begin, end] = range_of({index, count}, numel);
        EXPECT_EQ(begin, at) << numel << " in " << count;
        EXPECT_TRUE(begin % kChunkGrain == 0 || begin == numel) << numel << " in " << count;
        at = end;
      }
      EXPECT_EQ(at, numel) << count;
    }
  }
}

TEST(PlanTest, TextParses) {
  const Plan plan = parse_plan(kText);
  EXPECT_EQ(plan.text(), kText);
  EXPECT_EQ(parse_plan(plan.text()), plan);
  ASSERT_EQ(plan.steps.size(), 12U);
  EXPECT_EQ(plan.steps[7].units, (std::vector<int>{3, 2}));
  EXPECT_EQ(plan.steps[7].role, Role::kGrad);
  EXPECT_EQ(plan.steps[7].moves.size(), 3U);
  EXPECT_EQ(plan.steps[5].mark, Mark::kBegin);
}

TEST(PlanTest, CommentsAndBlankLinesAreSkipped) {
  EXPECT_EQ(parse_plan("# a plan\n\n  norm  \n"), parse_plan("norm"));
}

TEST(PlanTest, HashFollowsTheText) {
  const Plan plan = parse_plan(kText);
  EXPECT_EQ(plan.hash(), hash_text(kText));
  EXPECT_NE(plan.hash(), parse_plan("norm").hash());
}

TEST(PlanTest, WrongLinesAreNamed) {
  for (const char* wrong : {"fetch u1",
                            "micro",
                            "micro x",
                            "micro -1",
                            "move u1 param",
                            "move u1 prams slice(local)",
                            "move 1 param slice(local)",
                            "move u1+ param slice(local)",
                            "move u1 param slice(local);",
                            "update u1[1]",
                            "update u1[2/2]",
                            "update u1[0/",
                            "update u1[a/2]",
                            "update u1[0/2]x",
                            "forward",
                            "forward u1 middle",
                            "forward u1 end end",
                            "norm u1",
                            "update ux",
                            "drop u1 param slice(local)"}) {
    try {
      parse_step(wrong);
      ADD_FAILURE() << wrong << " was parsed";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(wrong), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace penstock::plan_test
