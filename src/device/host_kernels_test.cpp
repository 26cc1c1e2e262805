#include "src/device/host_kernels.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "src/device/on_target.h"
#include "src/device/sample_values.h"

namespace penstock::device::host {
namespace {

using namespace samples;  // NOLINT(google-build-using-namespace)

TEST(SumSquares, MatchesDoubleAndIgnoresThreads) {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t numel : {0L, 1L, 7L, 33L, 1000L, 100003L, 500000L}) {
      SampleValues values(dtype, numel, 3);
      values.randomize(5, -3, 3);
      double expected = 0;
      for (int64_t i = 0; i < numel; ++i) expected += double(values[i]) * double(values[i]);
      const double sum = sum_squares(values.data(), dtype, numel);
      EXPECT_NEAR(sum, expected, 1e-12 * expected) << dtype_name(dtype) << " " << numel;
      for (const int count : {1, 2, 5}) {
        const Threads threads(count);
        EXPECT_EQ(sum, sum_squares(values.data(), dtype, numel)) << count << " threads";
      }
    }
  }
}

TEST(SumSquares, LargeFp32DoesNotOverflow) {
  const std::vector<float> values(40, 3e38F);
  EXPECT_NEAR(sum_squares(values.data(), Dtype::kFp32, 40) / (40 * 9e76), 1.0, 1e-6);
}

TEST(SumSquares, InfAndNanShow) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (const Dtype dtype : kDtypes) {
      SampleValues values(dtype, 50000);
      values.randomize(1, -1, 1).set(49999, bad);
      EXPECT_FALSE(std::isfinite(sum_squares(values.data(), dtype, 50000)));
    }
  }
}

TEST(FirstNonfinite, FindsTheFirst) {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t numel : {1L, 7L, 1000L, 100003L}) {
      SampleValues values(dtype, numel, 1);
      values.randomize(1, -60000, 60000);
      EXPECT_EQ(first_nonfinite(values.data(), dtype, numel), -1);
      for (const int64_t index : {numel - 1, numel / 2, int64_t{0}}) {
        values.set(index, index % 2 == 0 ? NAN : -INFINITY);
        EXPECT_EQ(first_nonfinite(values.data(), dtype, numel), index);
      }
    }
    EXPECT_EQ(first_nonfinite(nullptr, dtype, 0), -1);
  }
}

void check_take_pairs() {
  for (const Dtype from : kDtypes) {
    for (const Dtype to : kDtypes) {
      for (const int64_t numel : kSizes) {
        SampleValues src(from, numel, 1), dst(to, numel, 3), expected(to, numel);
        src.randomize(1, -4, 4);
        dst.randomize(2, -4, 4);
        for (int64_t i = 0; i < numel; ++i) expected.set(i, dst[i] + src[i]);
        take(dst.data(), to, src.data(), from, numel, true);
        EXPECT_TRUE(dst.same_bits(expected)) << dtype_name(from) << dtype_name(to) << numel;
        for (int64_t i = 0; i < numel; ++i) expected.set(i, src[i]);
        take(dst.data(), to, src.data(), from, numel, false);
        EXPECT_TRUE(dst.same_bits(expected)) << dtype_name(from) << dtype_name(to) << numel;
        EXPECT_TRUE(dst.guard_intact());
      }
    }
  }
}

TEST(Take, MatchesScalarCastsForEveryPair) { check_take_pairs(); }

// Every 16-bit value and the fp32 values around each of them: ties, subnormals, overflow.
void check_rounding() {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
    std::vector<float> source;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = from_bits(static_cast<uint16_t>(bits), dtype);
      if (!std::isfinite(value)) continue;
      const float tie = 0.5F * value + 0.5F * from_bits(static_cast<uint16_t>(bits + 1), dtype);
      for (const float x : {value, std::nextafterf(value, INFINITY), tie,
                            std::nextafterf(tie, INFINITY), std::nextafterf(tie, -INFINITY)})
        source.push_back(x);
    }
    for (const float x : {INFINITY, -INFINITY, 65519.996F, 65520.0F, -65520.0F, 3.4e38F, 1e-45F,
                          2.9802322e-8F, 2.9802326e-8F})
      source.push_back(x);
    const auto numel = static_cast<int64_t>(source.size());
    SampleValues actual(dtype, numel), expected(dtype, numel);
    take(actual.data(), dtype, source.data(), Dtype::kFp32, numel, false);
    for (int64_t i = 0; i < numel; ++i) {
      if (std::isnan(source[i])) continue;
      expected.set(i, source[i]);
      ASSERT_EQ(std::signbit(actual[i]), std::signbit(expected[i])) << source[i];
      ASSERT_EQ(actual[i], expected[i]) << source[i];
    }
  }
}

TEST(Take, RoundsLikeTorchEverywhere) { check_rounding(); }

void check_widening() {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
    std::vector<uint16_t> source(65536);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint16_t>(i);
    std::vector<float> actual(65536);
    take(actual.data(), Dtype::kFp32, source.data(), dtype, 65536, false);
    for (int64_t i = 0; i < 65536; ++i) {
      const float expected = from_bits(static_cast<uint16_t>(i), dtype);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(actual[i])) << i;
      } else {
        ASSERT_EQ(std::memcmp(&actual[i], &expected, 4), 0) << i << " " << expected;
      }
    }
  }
}

TEST(Take, WidensEveryBitPattern) { check_widening(); }

void check_nan() {
  std::vector<uint32_t> bits = {0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001};
  bits.resize(35, 0x7F800001);
  for (const Dtype dtype : kDtypes) {
    SampleValues out(dtype, 35);
    take(out.data(), dtype, bits.data(), Dtype::kFp32, 35, false);
    for (int64_t i = 0; i < 35; ++i) EXPECT_TRUE(std::isnan(out[i])) << dtype_name(dtype) << i;
  }
}

TEST(Take, NanStaysNan) { check_nan(); }

// All tests above run on the best instruction set of this machine; the tests below run on each of
// its sets.
class TargetTest : public OnTarget<testing::TestWithParam<int64_t>> {};

TEST_P(TargetTest, CastsAreThoseOfTorch) {
  check_take_pairs();
  check_rounding();
  check_widening();
  check_nan();
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, TargetTest,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

}  // namespace
}  // namespace penstock::device::host
