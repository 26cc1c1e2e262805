#include "src/mem/arena.h"

#include <gtest/gtest.h>

#include <utility>

namespace penstock::mem {
namespace {

TEST(Arena, ReusesBuffersOfEqualSizeAndCountsEveryByte) {
  Arena arena(c10::Device(c10::DeviceType::CPU));
  char* first = nullptr;
  {
    Lease a = arena.take(4096, Account::kParam);
    const Lease b = arena.take(100, Account::kGrad);
    first = a.data();
    EXPECT_EQ(arena.usage().total_now, 4196);
    Lease moved = std::move(a);
    EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): moved-from leases are empty
    EXPECT_EQ(moved.data(), first);
  }
  EXPECT_EQ(arena.usage().total_now, 0);
  EXPECT_EQ(arena.usage().total_peak, 4196);
  EXPECT_EQ(arena.usage().peak[static_cast<size_t>(Account::kGrad)], 100);
  EXPECT_EQ(arena.take(4096, Account::kOptim).data(), first);
  arena.reset_peak();
  EXPECT_EQ(arena.usage().total_peak, 0);
}

TEST(Arena, HoldsNoMoreThanItsPeak) {
  Arena arena(c10::Device(c10::DeviceType::CPU));
  {
    const Lease a = arena.take(3000, Account::kParam);
    const Lease b = arena.take(2000, Account::kParam);
  }
  EXPECT_EQ(arena.usage().held, 5000);
  const Lease c = arena.take(2500, Account::kGrad);  // 3000 + 2000 unused are too much beside it
  EXPECT_EQ(arena.usage().held, 4500);
  const Lease d = arena.take(2000, Account::kGrad);
  EXPECT_EQ(arena.usage().held, 4500);
  EXPECT_EQ(arena.usage().total_peak, 5000);
  arena.trim();
  EXPECT_EQ(arena.usage().held, 4500);
}

}  // namespace
}  // namespace penstock::mem
