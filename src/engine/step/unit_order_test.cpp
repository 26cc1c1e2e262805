#include "src/engine/step/unit_order.h"

#include <gtest/gtest.h>

namespace penstock::engine {
namespace {

TEST(OrderRecord, NestedUnitsHaveBeginAndEndAndTheOthersAreWhole) {
  OrderRecord record;
  record.begin(0);
  for (const int unit : {2, 1, 2}) {  // block 2 is used twice, with 1 in between
    record.begin(unit);
    record.end(unit);
  }
  record.end(0);
  EXPECT_EQ(visits_text(record.visits(4)), "u0 begin\nu2 begin\nu1\nu2 end\nu3\nu0 end");
}

TEST(OrderRecord, EndsAloneAreWhole) {
  OrderRecord record;
  for (const int unit : {3, 2, 1, 0}) record.end(unit);
  EXPECT_EQ(visits_text(record.visits(4)), "u3\nu2\nu1\nu0");
}

TEST(FirstDifference, NamesTheRankAndBothLines) {
  EXPECT_EQ(first_difference({"a\nb", "a\nb"}), "");
  EXPECT_EQ(first_difference({"a\nb", "a\nb", "a\nc"}), "rank 0 has `b`, rank 2 has `c`");
  EXPECT_EQ(first_difference({"a", "a\nc"}), "rank 0 has `nothing more`, rank 1 has `c`");
}

}  // namespace
}  // namespace penstock::engine
