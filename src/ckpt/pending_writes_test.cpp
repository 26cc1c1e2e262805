#include "src/ckpt/pending_writes.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace penstock::ckpt {
namespace {

constexpr int64_t kBytes = 4096;

class PendingTest : public testing::Test {
 protected:
  PendingTest() : values_(3 * kBytes, 'a') {
    for (int i = 0; i < 2; ++i) {
      Source source;
      source.bytes = kBytes;
      source.data = values_.data() + i * kBytes;
      pending_.add(std::move(source), /*stays=*/i == 1);
    }
    Source on_disk;
    on_disk.bytes = kBytes;
    on_disk.offset = 1 << 20;
    pending_.add(std::move(on_disk), false);
  }

  // Runs `work` on a thread. Returns whether `work` returns within 100 ms.
  bool returns(const std::function<void()>& work) {
    waiter_ = std::thread([this, work] {
      work();
      returned_ = true;
    });
    for (int i = 0; i < 50 && !returned_; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return returned_;
  }
  void TearDown() override {
    if (waiter_.joinable()) waiter_.join();
    EXPECT_TRUE(returned_ || !waiter_.joinable());
  }

  mem::Tiers tiers_;
  std::string values_;
  PendingWrites pending_{tiers_};
  std::thread waiter_;
  std::atomic<bool> returned_ = false;
};

TEST_F(PendingTest, GivesOutEachOnceInOrder) {
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(pending_.next(), i);
  EXPECT_EQ(pending_.next(), std::nullopt);
}

TEST_F(PendingTest, WhatWaitsIsCopiedBeforeItChanges) {
  pending_.memory_changes(values_.data() + 100, 8);
  values_[100] = 'b';
  EXPECT_EQ(pending_.next(), 0U);
  EXPECT_EQ(pending_.at(0).data[100], 'a');
  pending_.memory_changes(values_.data(), kBytes);  // the copy is written
}

TEST_F(PendingTest, WhatIsBeingWrittenIsWaitedFor) {
  ASSERT_EQ(pending_.next(), 0U);
  EXPECT_FALSE(returns([this] { pending_.memory_changes(values_.data(), 1); }));
  EXPECT_TRUE(pending_.hurries());
  pending_.done({0});
}

TEST_F(PendingTest, WhatIsOnDiskIsWrittenFirst) {
  EXPECT_FALSE(returns([this] { pending_.disk_changes((1 << 20) + 4000, 200); }));
  ASSERT_EQ(pending_.next(), 2U);
  pending_.done({2});
}

TEST_F(PendingTest, WhatNobodySavesMayChange) {
  pending_.memory_changes(values_.data() + kBytes, kBytes);  // its owner promised not to change it
  pending_.memory_changes(values_.data() + 2 * kBytes, kBytes);
  pending_.disk_changes((1 << 20) + kBytes, kBytes);
  pending_.disk_changes((1 << 20) - kBytes, kBytes);
  EXPECT_EQ(pending_.at(0).data, values_.data());
}

TEST_F(PendingTest, WithoutMemoryForACopyItIsWrittenNow) {
  mem::Budget budget;
  budget.bytes = 100;
  tiers_.host.set_budget(budget);
  EXPECT_FALSE(returns([this] { pending_.memory_changes(values_.data(), 1); }));
  ASSERT_EQ(pending_.next(), 0U);
  EXPECT_EQ(pending_.at(0).data, values_.data());
  pending_.done({0});
}

TEST_F(PendingTest, ASaveThatFailsHoldsNobody) {
  EXPECT_FALSE(returns([this] { pending_.disk_changes(1 << 20, 1); }));
  pending_.abandon();
  pending_.memory_changes(values_.data(), 1);
}

}  // namespace
}  // namespace penstock::ckpt
