#include "examples/skeleton/count_moves.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "src/base/text.h"

namespace penstock {
namespace {

std::string read_file(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// "# kind = count" for each kind: the form of the golden file's first lines.
std::string header(const std::map<std::string, int64_t>& counts) {
  std::string lines;
  for (const auto& [kind, count] : counts) lines += concat("# ", kind, " = ", count, "\n");
  return lines;
}

TEST(CountMovesTest, GoldenPlan) {
  const std::string golden =
      read_file(concat(PENSTOCK_SOURCE_DIR, "/examples/skeleton/count_moves.plan"));
  ASSERT_FALSE(golden.empty());
  const Plan plan = parse_plan(golden);
  EXPECT_EQ(header(count_moves(plan)) + plan.text(), golden);
}

TEST(CountMovesTest, StepsWithoutMovesCountNothing) {
  EXPECT_TRUE(count_moves(parse_plan("forward u0\ndrop u0 param\nnorm\n")).empty());
}

TEST(CountMovesTest, EveryHopOfAStepCounts) {
  const auto counts =
      count_moves(parse_plan("move u0 param copy(host,device); all_gather(data)\n"));
  EXPECT_EQ(counts, (std::map<std::string, int64_t>{{"all_gather", 1}, {"copy", 1}}));
}

}  // namespace
}  // namespace penstock
