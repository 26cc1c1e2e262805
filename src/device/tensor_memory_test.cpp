#include "src/device/tensor_memory.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

namespace penstock::device {
namespace {

constexpr int64_t kMiB = 1 << 20;

// malloc rounds up, and a large buffer has whole pages.
bool about(int64_t bytes, int64_t expected) {
  return bytes >= expected && bytes < expected + kMiB / 16;
}

TEST(TensorMemory, CountsTensorsAndTheirPeak) {
  const at::Tensor before = at::empty({kMiB}, at::kByte);
  const auto memory = count_tensors(Device::host());
  ASSERT_NE(memory, nullptr);
  const int64_t start = memory->now();
  memory->take_peak();
  at::Tensor kept = at::empty({kMiB}, at::kByte);
  at::empty({4 * kMiB}, at::kByte);
  EXPECT_TRUE(about(memory->now() - start, kMiB));
  EXPECT_TRUE(about(memory->take_peak() - start, 5 * kMiB));
  EXPECT_TRUE(about(memory->take_peak() - start, kMiB)) << "the peak since the last call";
  kept = at::Tensor();
  EXPECT_EQ(memory->now(), start);
  EXPECT_TRUE(memory->alone());
}

TEST(TensorMemory, TensorsMayOutliveIt) {
  at::Tensor old = at::empty({kMiB}, at::kByte), made;
  {
    const auto memory = count_tensors(Device::host());
    const int64_t start = memory->now();
    old = at::Tensor();  // allocated earlier, so not counted
    EXPECT_EQ(memory->now(), start);
    made = at::ones({kMiB}, at::kByte);
    std::thread([&] { made.resize_({2 * kMiB}); }).join();
    EXPECT_TRUE(about(memory->now() - start, 2 * kMiB));
  }
  EXPECT_EQ(c10::GetCPUAllocator(), c10::GetDefaultCPUAllocator());
  EXPECT_EQ(made.slice(0, 0, kMiB).sum().item<int64_t>(), kMiB);
  made.resize_({4 * kMiB});
}

TEST(TensorMemory, OneObjectAtATimeCountsTheHost) {
  const auto first = count_tensors(Device::host());
  EXPECT_EQ(count_tensors(Device::host()), nullptr);
  EXPECT_FALSE(first->alone()) << "a second engine's tensors may be among those counted";
}

class OwnAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

TEST(TensorMemory, AnotherEngineThatTrainsIsSeen) {
  const auto memory = count_tensors(Device::host());
  EXPECT_TRUE(memory->alone());
  disturb_counts();
  EXPECT_FALSE(memory->alone());
}

TEST(TensorMemory, OfManyThatBeginAtOnceNoneIsAlone) {
  std::vector<std::unique_ptr<TensorMemory>> all(8);
  std::vector<std::thread> threads;
  for (auto& one : all) threads.emplace_back([&one] { one = count_tensors(Device::host()); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(all.begin(), all.end(), nullptr), 7);
  for (const auto& one : all) EXPECT_FALSE(one != nullptr && one->alone());
}

TEST(TensorMemory, LeavesAnAllocatorOfTheUsersAlone) {
  OwnAllocator own;
  c10::SetCPUAllocator(&own);
  EXPECT_EQ(count_tensors(Device::host()), nullptr);
  EXPECT_EQ(c10::GetCPUAllocator(), &own);
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  auto memory = count_tensors(Device::host());
  c10::SetCPUAllocator(&own);
  EXPECT_FALSE(memory->alone()) << "it was set while tensors were counted";
  memory.reset();
  EXPECT_EQ(c10::GetCPUAllocator(), &own);
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
}

}  // namespace
}  // namespace penstock::device
