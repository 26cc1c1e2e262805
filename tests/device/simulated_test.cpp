// Uses the simulated accelerator from C++ as an engine does: only through c10's generic interfaces,
// without Python.
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/device/simulated/control.h"

namespace penstock::sim {
namespace {

constexpr auto kSim = c10::kPrivateUse1;
const c10::Device kDevice(kSim, 0);

at::TensorOptions floats(c10::Device device = kDevice) {
  return at::TensorOptions().dtype(at::kFloat).device(device);
}

class SimulatedTest : public testing::Test {
 protected:
  void SetUp() override { at::globalContext().lazyInitDevice(kSim); }
  void TearDown() override {
    set_delays_us(0, 0);
    set_memory_limit(size_t{4} << 30);
    set_pinning_fails(false);
    set_allocations_wait(false);
    reset_errors();
    drain();
  }
  const c10::impl::VirtualGuardImpl guard_{kSim};
};

TEST_F(SimulatedTest, IsTheAccelerator) {
  EXPECT_EQ(at::getAccelerator(), kSim);
  EXPECT_EQ(at::accelerator::deviceCount(), kDevices);
  EXPECT_EQ(c10::Device("sim:3").index(), 3);
  EXPECT_EQ(at::zeros({2}, floats({kSim, 5})).device().index(), 5);
}

TEST_F(SimulatedTest, TensorsOverPartsOfAFlatBuffer) {
  auto flat = at::zeros({64}, floats());
  auto* data = static_cast<float*>(flat.mutable_data_ptr());
  auto found = at::from_blob(data + 16, {4, 4}, floats());  // finds the device of the pointer
  auto told = at::for_blob(data + 32, {16}).options(floats()).target_device(kDevice).make_tensor();
  found.copy_(at::full({4, 4}, 2.0));
  told.add_(found.view({16})).mul_(3);
  EXPECT_EQ(flat.sum().item<float>(), 32 + 96);
  EXPECT_EQ(at::_foreach_norm({found, told}, 2, at::kDouble)[1].item<double>(), 24);
  EXPECT_EQ(at::linalg_vector_norm(flat, 2, {}, false, at::kDouble).item<double>(), std::sqrt(640));
  EXPECT_TRUE(at::isfinite(flat).all().item<bool>());
  EXPECT_EQ(found.ne(2).sum().item<int64_t>(), 0);
  EXPECT_EQ(told.view(at::kInt).view({16})[3].item<int>(), 0x40C00000);
}

// A tensor whose memory can be freed and given back.
class Window {
 public:
  Window(size_t bytes, at::IntArrayRef sizes) {
    storage_ = c10::Storage(
        c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                              c10::DataPtr(nullptr, kDevice), nullptr, false));
    tensor = at::empty({0}, floats()).set_(storage_, 0, sizes);
  }
  void point_to(void* memory) { impl().set_data_ptr_noswap(c10::DataPtr(memory, kDevice)); }
  void forbid(const std::string& why) {
    impl().release_data_and_set_meta_custom_data_ptr_error_msg_(why);
  }
  at::Tensor tensor;

 private:
  c10::StorageImpl& impl() { return *storage_.unsafeGetStorageImpl(); }
  c10::Storage storage_;
};

TEST_F(SimulatedTest, AWindowMoves) {
  auto flat = at::zeros({8}, floats());
  auto* data = static_cast<float*>(flat.mutable_data_ptr());
  Window window(16, {4});
  for (const int offset : {0, 4}) {
    window.point_to(data + offset);
    window.tensor.fill_(offset + 1);
  }
  EXPECT_EQ(flat.sum().item<float>(), 4 * 1 + 4 * 5);
}

TEST_F(SimulatedTest, AWindowWithoutMemoryFailsOnTheDevice) {
  Window window(16, {4});
  window.tensor.fill_(1);
  EXPECT_THROW(guard_.synchronizeDevice(0), c10::AcceleratorError);
  EXPECT_THROW(at::empty({1}, floats()), c10::AcceleratorError);  // the error stays
  EXPECT_NO_THROW(at::empty({1}, floats({kSim, 1})));             // on its device only
}

TEST_F(SimulatedTest, AForbiddenWindowFailsOnTheHostAtTheLaunch) {
  Window window(16, {4});
  window.forbid("parameter w was let go");
  try {
    window.tensor.add(1);
    ADD_FAILURE() << "no exception";
  } catch (const c10::Error& error) {
    EXPECT_NE(error.msg().find("parameter w was let go"), std::string::npos) << error.msg();
  }
  EXPECT_THROW(at::ones({4}, floats()).add_(window.tensor), c10::Error);
  EXPECT_THROW(window.tensor.copy_(at::ones({4})), c10::Error);
  EXPECT_NO_THROW(guard_.synchronizeDevice(0));
}

TEST_F(SimulatedTest, EventsOrderStreamsOfSeveralThreads) {
  set_delays_us(0, 100);
  for (int seed = 0; seed < 10; ++seed) {
    set_seed(seed);
    auto x = at::zeros({1000}, floats());
    const auto first = guard_.getStreamFromGlobalPool(kDevice);
    const auto second = guard_.getStreamFromGlobalPool(kDevice);
    c10::Event made(kSim), filled(kSim, c10::EventFlag::BACKEND_DEFAULT);
    c10::Event read(kSim, c10::EventFlag::BACKEND_DEFAULT);
    made.record(guard_.getStream(kDevice));
    {
      const c10::StreamGuard on_first(first);
      made.block(first);
      x.fill_(3);
      filled.record(first);
    }
    at::Tensor sum;
    std::thread([&] {  // its current stream ends with the thread
      guard_.exchangeStream(second);
      filled.block(second);
      sum = x.sum();
      guard_.recordDataPtrOnStream(x.storage().data_ptr(), second);
      read.record(second);
    })
        .join();
    x.reset();
    at::zeros({1000}, floats());  // would reuse the memory of x
    read.synchronize();
    EXPECT_TRUE(read.query());
    EXPECT_GE(filled.elapsedTime(read), 0);
    EXPECT_EQ(sum.item<float>(), 3000);
  }
}

TEST_F(SimulatedTest, CountsWaitsOfTheGenericInterfaces) {
  const auto stream = guard_.getStreamFromGlobalPool(kDevice);
  auto pinned = at::getHostAllocator(kSim)->allocate(4000);
  auto host = at::from_blob(pinned.get(), {1000}, at::kFloat).fill_(3);
  ASSERT_TRUE(host.is_pinned());
  at::Tensor x;
  {
    const c10::StreamGuard on_stream(stream);
    at::empty({1000}, floats());  // leaves memory in the cache
    reset_counters();
    x = at::empty({1000}, floats());
    x.copy_(host, true);
    x.mul_(2);
    host.copy_(x, true);
  }
  EXPECT_EQ(counters().host_waits, 0);
  stream.synchronize();
  EXPECT_EQ(host.sum().item<float>(), 6000);
  const auto now = counters();
  EXPECT_EQ(now.host_waits_by_name, (std::map<std::string, int64_t>{{"stream", 1}}));
  EXPECT_EQ(now.h2d.bytes, 4000);
  EXPECT_EQ(now.d2h.count, 1);
}

TEST_F(SimulatedTest, MemoryRunsOut) {
  set_memory_limit(1 << 20, 2);
  const c10::DeviceGuard on_second({kSim, 2});
  auto* allocator = c10::GetAllocator(kSim);
  void* kept = allocator->raw_allocate(1 << 19);
  EXPECT_THROW(allocator->raw_allocate(1 << 20), c10::OutOfMemoryError);
  allocator->raw_deallocate(kept);
  allocator->raw_deallocate(allocator->raw_allocate(1 << 20));
  EXPECT_EQ(at::accelerator::getMemoryInfo(2).second, 1 << 20);
  EXPECT_EQ(at::accelerator::getDeviceStats(2).num_ooms, 1);
}

// An engine takes its memory from the allocator itself.
TEST_F(SimulatedTest, CountsNewMemory) {
  auto* const allocator = c10::GetAllocator(kSim);
  c10::getDeviceAllocator(kSim)->emptyCache();
  reset_counters();
  for (int i = 0; i < 2; ++i) {
    allocator->raw_deallocate(allocator->raw_allocate(3 << 20));
    at::getHostAllocator(kSim)->allocate(3 << 20);
  }
  const auto now = counters();
  EXPECT_EQ(now.host_waits_by_name,
            (std::map<std::string, int64_t>{{"allocator", 1}, {"pinned", 1}}));
  EXPECT_EQ(now.temporaries.bytes, 0);
}

TEST_F(SimulatedTest, NewMemoryWaitsForAllDevices) {
  set_allocations_wait(true);
  set_delays_us(1000, 1000);
  const auto slow = [] {
    for (int i = 0; i < 30; ++i) at::ones({1}, floats({kSim, 1}));
  };
  const auto is_late = [this] { return !guard_.queryStream(guard_.getStream({kSim, 1})); };
  slow();
  at::empty({5 << 20}, floats());
  EXPECT_FALSE(is_late());
  slow();
  at::getHostAllocator(kSim)->allocate(33 << 20);
  EXPECT_FALSE(is_late());
}

TEST_F(SimulatedTest, CountsTraffic) {
  const auto x = at::ones({1000}, floats());
  reset_counters();
  x.add_(1);
  EXPECT_EQ(at::linalg_vector_norm(x, 2, {}, false, at::kDouble).numel(), 1);
  const auto now = counters();
  EXPECT_EQ(now.traffic.count, 2);
  EXPECT_EQ(now.traffic.bytes, 2 * 4000 + (4000 + 2 * 8000 + 8));
  EXPECT_EQ(now.temporaries.bytes, 8000 + 8);  // the norm's argument in fp64, and its result
}

TEST_F(SimulatedTest, PinningFails) {
  set_pinning_fails(true);
  EXPECT_THROW(at::getHostAllocator(kSim)->allocate(100), c10::Error);
}

// The classic error: the host frees memory that another stream still reads.
TEST_F(SimulatedTest, FindsAMissingRecordStream) {
  int wrong = 0;
  set_delays_us(0, 50);
  for (int seed = 0; seed < 20; ++seed) {
    set_seed(seed);
    const auto side = guard_.getStreamFromGlobalPool(kDevice);
    auto x = at::full({100}, 2.0, floats());
    c10::Event made(kSim);
    made.record(guard_.getStream(kDevice));
    at::Tensor sum;
    {
      const c10::StreamGuard on_side(side);
      made.block(side);
      sum = x.sum();
    }
    x.reset();
    x = at::full({100}, 5.0, floats());
    side.synchronize();
    wrong += sum.item<float>() != 200;
  }
  EXPECT_GT(wrong, 0);
}

}  // namespace
}  // namespace penstock::sim
