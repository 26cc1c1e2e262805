// Memory, lanes and fences on the simulated accelerator, whose streams run late.
#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <optional>

#include "src/device/kernels.h"
#include "src/device/lane.h"
#include "src/mem/arena.h"
#include "tests/device/simulated/control.h"

namespace penstock::mem {
namespace {

constexpr int64_t kValues = 1000, kBytes = kValues * 4;
constexpr int kTurns = 20;

class MemoryTest : public testing::Test {
 protected:
  MemoryTest()
      : device_([] {
          at::globalContext().lazyInitDevice(c10::kPrivateUse1);
          return c10::Device(c10::kPrivateUse1, 0);
        }()) {}
  void SetUp() override {
    sim::set_seed(7);
    sim::set_delays_us(0, 300);
  }
  void TearDown() override {
    sim::set_delays_us(0, 0);
    sim::drain();
  }

  // Returns a view of fp32 values on the device. Uses this thread's stream.
  at::Tensor view(device::Address at) const { return device::view(at, Dtype::kFp32, kValues); }

  const device::Device device_;
};

TEST_F(MemoryTest, DeviceMemoryIsUsedAgainAfterItsLastUser) {
  const device::Unseen unseen;
  Pool pool(MemoryKind::kDevice, device_);
  const c10::Stream streams[] = {device_.side_stream(), device_.side_stream()};
  for (int turn = 0; turn < kTurns; ++turn) {
    const void* first = nullptr;
    at::Tensor sum;
    for (int user = 0; user < 2; ++user) {
      const c10::StreamGuard guard(streams[user]);
      c10::DataPtr memory = pool.take(kBytes);
      if (user == 0) first = memory.get();
      EXPECT_EQ(memory.get(), first);
      const at::Tensor values = view(pool.address(memory));
      for (int i = 0; i < 5 * (1 - user); ++i) values.fill_(7.0);
      values.fill_(user);
      sum = values.sum(at::kDouble);
      pool.give_back(std::move(memory), kBytes);
      if (user == 1) {
        EXPECT_EQ(device::read({sum}).front(), kValues);
      }
    }
  }
}

TEST_F(MemoryTest, PinnedMemoryIsUsedAgainAfterItsCopies) {
  const device::Unseen unseen;
  Pool pool(MemoryKind::kPinned, device_), on_device(MemoryKind::kDevice, device_);
  c10::DataPtr memory = on_device.take(kBytes);
  const device::Address there = on_device.address(memory);
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int i = 0; i < 5; ++i) device::zero(there, kBytes);
    for (const float value : {1.0F, 2.0F}) {
      c10::DataPtr pinned = pool.take(kBytes);
      std::fill_n(static_cast<float*>(pinned.get()), kValues, value);
      if (value == 1.0F) device::copy(there, pool.address(pinned), kBytes);
      pool.give_back(std::move(pinned), kBytes);
    }
    EXPECT_EQ(device::read({view(there).sum(at::kDouble)}).front(), kValues);
  }
  on_device.give_back(std::move(memory), kBytes);
}

TEST_F(MemoryTest, TheHostSeesWhatALaneSentIt) {
  const device::Unseen unseen;
  device::Lane lane("down", device_, device::LaneKind::kQueued);
  Pool pool(MemoryKind::kPinned, device_), on_device(MemoryKind::kDevice, device_);
  c10::DataPtr pinned = pool.take(kBytes), memory = on_device.take(kBytes);
  const device::Address there = on_device.address(memory), here = pool.address(pinned);
  for (int turn = 1; turn <= kTurns; ++turn) {
    view(there).fill_(turn);
    const device::Fence sent = lane.submit([&] { device::copy(here, there, kBytes); });
    sent.wait_on_host();
    EXPECT_EQ(static_cast<const float*>(pinned.get())[kValues - 1], static_cast<float>(turn));
  }
  on_device.give_back(std::move(memory), kBytes);
  pool.give_back(std::move(pinned), kBytes);
}

TEST_F(MemoryTest, WorkAfterAFenceComesAfterTheLane) {
  const device::Unseen unseen;
  device::Lane lane("up", device_, device::LaneKind::kQueued);
  Pool on_device(MemoryKind::kDevice, device_);
  c10::DataPtr memory = on_device.take(kBytes);
  const device::Address there = on_device.address(memory);
  for (int turn = 1; turn <= kTurns; ++turn) {
    const device::Fence made = lane.submit([&] {
      for (int i = 0; i <= turn % 3; ++i) view(there).fill_(turn);
    });
    made.wait();
    EXPECT_EQ(device::read({view(there).sum(at::kDouble)}).front(), turn * kValues);
  }
  on_device.give_back(std::move(memory), kBytes);
}

}  // namespace
}  // namespace penstock::mem
