#include "src/device/lane.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace penstock::device {
namespace {

TEST(Lane, RunsInOrder) {
  Lane lane("test");
  std::vector<int> order;
  Fence last;
  for (int i = 0; i < 100; ++i) last = lane.submit([&order, i] { order.push_back(i); });
  last.wait();
  ASSERT_EQ(order.size(), 100U);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

void check_errors(LaneKind kind) {
  Lane lane("test", Device::host(), kind);
  bool ran = false;
  const Fence bad = lane.submit([] { throw std::runtime_error("first"); });
  const Fence after = lane.submit([&ran] { ran = true; });
  EXPECT_THROW(bad.wait(), std::runtime_error);
  try {
    after.wait();
    FAIL() << "the later fence carries the error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  EXPECT_FALSE(ran);
}

TEST(Lane, KeepsItsFirstErrorAndRunsNothingAfterIt) { check_errors(LaneKind::kThread); }
TEST(Lane, WithoutAThreadToo) { check_errors(LaneKind::kQueued); }

void check_close(LaneKind kind) {
  Lane lane("test", Device::host(), kind);
  bool ran = false;
  lane.submit([] {}).wait();
  lane.close();
  lane.close();
  EXPECT_THROW(lane.submit([&ran] { ran = true; }).wait(), std::runtime_error);
  EXPECT_FALSE(ran);
}

TEST(Lane, RunsNothingAfterClose) {
  check_close(LaneKind::kThread);
  check_close(LaneKind::kQueued);
}

TEST(Fence, ADefaultFenceIsDone) { Fence().wait(); }

}  // namespace
}  // namespace penstock::device
