#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

#include "src/device/device.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"

namespace penstock::device::host {
namespace {

class Edits : public testing::TestWithParam<std::pair<Dtype, at::ScalarType>> {};

TEST_P(Edits, ReplaceWhatWasChangedAndNothingElse) {
  const auto [dtype, type] = GetParam();
  const int64_t numel = 3 * 16 * 1024 + 77;  // several threads, and a remainder
  const at::Tensor kept = at::randn({numel}), before = kept.clone();
  const at::Tensor values = kept.to(type);
  EXPECT_EQ(first_edit(kept.data_ptr(), Dtype::kFp32, values.data_ptr(), dtype, numel), -1);
  take_edits(kept.data_ptr(), Dtype::kFp32, values.data_ptr(), dtype, numel);
  EXPECT_TRUE(kept.equal(before));  // including the bits that rounding drops
  at::Tensor expected = before.clone();
  for (const int64_t place : {int64_t{5}, int64_t{2047}, int64_t{2048}, numel - 1}) {
    values[place] = 0.5;
    expected[place] = 0.5;
  }
  EXPECT_EQ(first_edit(kept.data_ptr(), Dtype::kFp32, values.data_ptr(), dtype, numel), 5);
  take_edits(kept.data_ptr(), Dtype::kFp32, values.data_ptr(), dtype, numel);
  EXPECT_TRUE(kept.equal(expected));
}

TEST_P(Edits, KeepWhatIsNotPublishedYet) {
  const auto [dtype, type] = GetParam();
  const int64_t numel = 2 * 16 * 1024 + 77;
  const at::Tensor kept = at::randn({numel}), base = at::randn({numel}).to(type);
  base[7] = std::numeric_limits<float>::infinity();
  const at::Tensor values = base.clone(), own = kept.clone();
  at::Tensor expected = kept.clone();
  const at::Tensor unsent = kept.to(type).to(at::kFloat).sub(base.to(at::kFloat));
  for (const int64_t place : {int64_t{5}, int64_t{2047}, int64_t{2048}, numel - 1}) {
    values[place] = 0.5;
    expected[place] = unsent[place].add(0.5F);
  }
  values[7] = expected[7] = 0.25;  // nothing finite is left to publish
  take_edits(kept.mutable_data_ptr<float>(), values.data_ptr(), base.data_ptr(), dtype, numel);
  EXPECT_TRUE(kept.equal(expected));
  const Device device(at::kCPU);  // torch's operations instead of the kernels
  const auto at = [&](const at::Tensor& one) { return Address{one.data_ptr(), &device}; };
  device::take_edits(at(own), at(values), at(base), dtype, numel);
  EXPECT_TRUE(own.equal(expected));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Edits,
                         testing::Values(std::pair{Dtype::kBf16, at::kBFloat16},
                                         std::pair{Dtype::kFp16, at::kHalf}));

}  // namespace
}  // namespace penstock::device::host
