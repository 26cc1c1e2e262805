#include "src/device/kernels.h"

#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cmath>

#include "src/device/device.h"

namespace penstock::device {
namespace {

constexpr int64_t kNumel = 1 << 16;

// Counts the bytes that torch allocates on the CPU while this object exists.
class CountedAllocations final : public c10::Allocator {
 public:
  CountedAllocations() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this); }
  ~CountedAllocations() override { c10::SetCPUAllocator(before_); }
  CountedAllocations(const CountedAllocations&) = delete;
  CountedAllocations& operator=(const CountedAllocations&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    bytes_ += static_cast<int64_t>(bytes);
    return before_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }
  int64_t bytes() const { return bytes_; }

 private:
  c10::Allocator* const before_;
  int64_t bytes_ = 0;
};

// The CPU as a device: runs torch's own kernels, with the same temporaries as on any device.
Address on_device(const at::Tensor& values) { return {values.mutable_data_ptr(), &Device::host()}; }

template <typename Call>
int64_t allocated(const Call& call) {
  const CountedAllocations counted;
  call();
  return counted.bytes();
}

TEST(DeviceKernels, ReductionsMakeNoWiderCopyOfTheValues) {
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    const at::Tensor values = at::randn({kNumel}).to(scalar_type(dtype));
    const at::Tensor kept = values.to(at::kFloat);
    const Address at = on_device(values);
    // CUDA sums bf16 in fp32 without a copy, but the CPU makes an fp32 copy.
    const int64_t widened = dtype == Dtype::kFp32 ? 0 : kNumel * 4;
    EXPECT_LE(allocated([&] { norm_on_device(at, dtype, kNumel); }), widened + (1 << 10));
    EXPECT_LE(allocated([&] { sum_on_device(at, dtype, kNumel); }), widened + (1 << 10));
    EXPECT_LE(allocated([&] { fingerprint(at, kNumel * dtype_bytes(dtype)); }),
              kNumel * dtype_bytes(dtype) / 8);
    const int64_t rounded = dtype == Dtype::kFp32 ? 0 : kNumel * dtype_bytes(dtype);
    EXPECT_LE(
        allocated([&] { edited_on_device(on_device(kept), Dtype::kFp32, at, dtype, kNumel); }),
        rounded + kNumel + (1 << 10));
  }
}

TEST(DeviceKernels, SquaresThatOverflowFp32AreFiniteInDouble) {
  const at::Tensor values = at::full({kNumel}, 1e20F);
  const Address at = on_device(values);
  EXPECT_TRUE(std::isinf(read({norm_on_device(at, Dtype::kFp32, kNumel)}).front()));
  const double exact = read({exact_squares_on_device(at, Dtype::kFp32, kNumel)}).front();
  EXPECT_NEAR(exact / (1e40 * kNumel), 1.0, 1e-6);
}

TEST(DeviceKernels, AFingerprintTellsEditsThatKeepTheSum) {
  const at::Tensor values = at::randn({kNumel});
  const Address at = on_device(values);
  const at::Tensor before = fingerprint(at, kNumel * 4);
  const auto differs = [&] { return read({differ(before, fingerprint(at, kNumel * 4))}).front(); };
  EXPECT_EQ(differs(), 0.0);
  const float first = values[0].item<float>(), other = values[1000].item<float>();
  values[0] = other;
  values[1000] = first;
  EXPECT_GT(differs(), 0.0) << "two values changed places";
  values[0] = first;
  values[1000] = other;
  EXPECT_EQ(differs(), 0.0);
  values[5] = std::nextafter(values[5].item<float>(), 9.0F);
  EXPECT_GT(differs(), 0.0) << "one bit";
}

TEST(DeviceKernels, AnEditIsSeenAfterRounding) {
  const at::Tensor kept = at::randn({kNumel}), values = kept.to(at::kBFloat16);
  const auto edited = [&] {
    return read({edited_on_device(on_device(kept), Dtype::kFp32, on_device(values), Dtype::kBf16,
                                  kNumel)})
        .front();
  };
  EXPECT_EQ(edited(), 0.0);
  values[7] = 100.0;
  values[8] = 100.0;
  EXPECT_EQ(edited(), 1.0);
}

}  // namespace
}  // namespace penstock::device
