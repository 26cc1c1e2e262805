#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "src/device/host_kernels.h"
#include "src/device/on_target.h"

namespace penstock::device::host {
namespace {

constexpr int64_t kGuard = 8;  // values on both sides that must not change

struct Case {
  Dtype from, to;
  at::ScalarType from_type, to_type;
};

std::vector<Case> cases() {
  const std::pair<Dtype, at::ScalarType> types[] = {
      {Dtype::kFp32, at::kFloat}, {Dtype::kBf16, at::kBFloat16}, {Dtype::kFp16, at::kHalf}};
  std::vector<Case> all;
  for (const auto& [from, from_type] : types)
    for (const auto& [to, to_type] : types) all.push_back({from, to, from_type, to_type});
  return all;
}

char* data(const at::Tensor& values) {
  return static_cast<char*>(values.data_ptr()) + kGuard * values.element_size();
}

// Runs take() and take_checked() on copies of `dst`. Expects the same bits, and that take_checked()
// returns `finite`.
void check(const Case& c, const at::Tensor& src, const at::Tensor& dst, bool finite) {
  const int64_t numel = src.numel() - 2 * kGuard;
  for (const bool accumulate : {false, true}) {
    const at::Tensor expected = dst.clone(), actual = dst.clone();
    take(data(expected), c.to, data(src), c.from, numel, accumulate);
    EXPECT_EQ(take_checked(data(actual), c.to, data(src), c.from, numel, accumulate), finite);
    EXPECT_EQ(std::memcmp(expected.data_ptr(), actual.data_ptr(), dst.nbytes()), 0)
        << dtype_name(c.from) << " to " << dtype_name(c.to) << ", " << numel;
  }
}

void check_case(const Case& c, int64_t numel) {
  at::Tensor src = at::rand({numel + 2 * kGuard}).to(c.from_type);
  at::Tensor dst = at::rand({numel + 2 * kGuard}).to(c.to_type);
  src[0] = NAN;  // outside the range
  if (numel > 0) dst[kGuard] = INFINITY;
  check(c, src, dst, true);
  for (const int64_t bad : {int64_t{0}, numel / 2, numel - 1}) {
    if (numel == 0) return;
    at::Tensor broken = src.clone();
    broken[kGuard + bad] = bad % 2 == 0 ? -INFINITY : NAN;
    check(c, broken, dst, false);
  }
}

class TakeChecked : public samples::OnTarget<testing::TestWithParam<int64_t>> {};

TEST_P(TakeChecked, HasTheBitsOfTakeAndSeesEveryBadSourceAndNothingElse) {
  for (const Case& c : cases())
    for (const int64_t numel : {0, 1, 7, 33, 2048, 2049, 50003}) check_case(c, numel);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, TakeChecked,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

TEST(TakeCheckedCast, ThatOverflowsIsNoBadSource) {
  const std::vector<float> src(100, 3e38F);
  std::vector<uint16_t> half(100);
  EXPECT_TRUE(take_checked(half.data(), Dtype::kFp16, src.data(), Dtype::kFp32, 100, false));
  EXPECT_EQ(half[99], 0x7C00);
}

}  // namespace
}  // namespace penstock::device::host
