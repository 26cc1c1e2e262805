#include "src/exec/lane.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace penstock::exec {
namespace {

TEST(Lane, RunsInOrder) {
  Lane lane("test");
  std::vector<int> order;
  Event last;
  for (int i = 0; i < 100; ++i) last = lane.submit([&order, i] { order.push_back(i); });
  last.wait();
  ASSERT_EQ(order.size(), 100U);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(Lane, KeepsItsFirstErrorAndRunsNothingAfterIt) {
  Lane lane("test");
  bool ran = false;
  const Event bad = lane.submit([] { throw std::runtime_error("first"); });
  const Event after = lane.submit([&ran] { ran = true; });
  EXPECT_THROW(bad.wait(), std::runtime_error);
  try {
    after.wait();
    FAIL() << "the later event carries the error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  EXPECT_FALSE(ran);
}

TEST(Event, ADefaultEventIsDone) { Event().wait(); }

}  // namespace
}  // namespace penstock::exec
