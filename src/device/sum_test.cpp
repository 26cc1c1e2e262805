#include "src/device/sum.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "penstock/error.h"

namespace penstock::device {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16};

float read(const void* at, Dtype dtype, int64_t i) {
  if (dtype == Dtype::kBf16) return static_cast<const c10::BFloat16*>(at)[i];
  if (dtype == Dtype::kFp16) return static_cast<const c10::Half*>(at)[i];
  return static_cast<const float*>(at)[i];
}

float rounded(Dtype dtype, float value) {
  if (dtype == Dtype::kBf16) return c10::BFloat16(value);
  if (dtype == Dtype::kFp16) return c10::Half(value);
  return value;
}

// `numel` random values that start one value into the buffer (misaligned), followed by a guard.
std::vector<char> random_values(Dtype dtype, int64_t numel, uint32_t seed) {
  std::vector<char> bytes(static_cast<size_t>((numel + 9) * dtype_bytes(dtype)));
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> draw(-2, 2);
  for (int64_t i = 0; i < numel + 9; ++i) {
    if (dtype == Dtype::kBf16) {
      reinterpret_cast<c10::BFloat16*>(bytes.data())[i] = draw(engine);
    } else if (dtype == Dtype::kFp16) {
      reinterpret_cast<c10::Half*>(bytes.data())[i] = draw(engine);
    } else {
      reinterpret_cast<float*>(bytes.data())[i] = draw(engine);
    }
  }
  return bytes;
}

struct Case {
  Dtype dst, src;
  int num_sources;
  int64_t numel;
  bool accumulate;
};

// Sums into a copy of the destination. Expects the same bits, and the squares of the written
// values.
void check_squares(Sum sum, const std::vector<char>& expected, std::vector<char>& dst) {
  sum.dst = dst.data() + dtype_bytes(sum.dst_dtype);
  const double squares = sum_chunks_and_squares(sum);
  ASSERT_EQ(dst, expected);
  double total = 0.0;
  for (int64_t i = 0; i < sum.numel; ++i) {
    const double value = read(sum.dst.data, sum.dst_dtype, i);
    total += value * value;
  }
  ASSERT_NEAR(squares, total, 1e-12 * total);
}

void check(const Case& c) {
  const float scale = 0.375F;
  std::vector<std::vector<char>> buffers;
  std::vector<const void*> sources;
  for (int s = 0; s < c.num_sources; ++s) {
    buffers.push_back(random_values(c.src, c.numel, static_cast<uint32_t>(s + 1)));
    sources.push_back(buffers.back().data() + dtype_bytes(c.src));
  }
  std::vector<char> dst = random_values(c.dst, c.numel, 99);
  const std::vector<char> before = dst;
  const Sum sum_of_all{
      dst.data() + dtype_bytes(c.dst), c.dst, sources, c.src, c.numel, scale, c.accumulate};
  std::vector<char> with_squares = dst;
  sum_chunks(sum_of_all);
  check_squares(sum_of_all, dst, with_squares);
  for (int64_t i = 0; i < c.numel; ++i) {
    float sum = read(sources[0], c.src, i);
    for (int s = 1; s < c.num_sources; ++s) sum += read(sources[s], c.src, i);
    const float with = c.accumulate ? read(before.data(), c.dst, i + 1) : 0.0F;
    const float fused = rounded(c.dst, std::fmaf(sum, scale, with));
    const float separate = rounded(c.dst, sum * scale + with);  // machines without FMA
    const float actual = read(dst.data(), c.dst, i + 1);
    ASSERT_TRUE(actual == fused || actual == separate) << i << ": " << actual << " " << fused;
  }
  for (int64_t i = c.numel + 1; i < c.numel + 9; ++i)
    ASSERT_EQ(read(dst.data(), c.dst, i), read(before.data(), c.dst, i)) << "written past the end";
  ASSERT_EQ(read(dst.data(), c.dst, 0), read(before.data(), c.dst, 0)) << "written before it";
}

TEST(SumChunks, SumsInFp32InOrderAndRoundsOnce) {
  for (const Dtype dst : kDtypes)
    for (const Dtype src : kDtypes)
      for (const int num_sources : {1, 2, 3, 7})
        for (const int64_t numel : {0L, 1L, 7L, 33L, 1000L, 5003L})
          for (const bool accumulate : {false, true})
            check({dst, src, num_sources, numel, accumulate});
  check({Dtype::kFp32, Dtype::kBf16, 4, 100003, false});
  check({Dtype::kBf16, Dtype::kBf16, 4, 100003, true});
}

TEST(SumChunks, DestinationMayBeASource) {
  std::vector<float> a(70001, 1.0F), b(70001, 2.0F);
  const std::vector<const void*> sources = {a.data(), b.data()};
  sum_chunks({b.data(), Dtype::kFp32, sources, Dtype::kFp32, 70001, 0.5F});
  for (const float value : b) ASSERT_EQ(value, 1.5F);
}

TEST(SumChunks, InfAndNanPass) {
  std::vector<float> a(21, INFINITY), b(21, -INFINITY), out(21);
  const std::vector<const void*> sources = {a.data(), b.data()};
  Sum sum{out.data(), Dtype::kFp32, std::span(sources).first(1), Dtype::kFp32, 21};
  EXPECT_EQ(sum_chunks_and_squares(sum), INFINITY);
  for (const float value : out) EXPECT_EQ(value, INFINITY);
  sum.sources = sources;
  EXPECT_TRUE(std::isnan(sum_chunks_and_squares(sum)));
  for (const float value : out) EXPECT_TRUE(std::isnan(value));
}

TEST(SumChunks, SquaresOfTheLargestValuesAreFiniteAndOneBadValueShows) {
  std::vector<float> source(50001, 3e38F), out(50001);
  const std::vector<const void*> sources = {source.data()};
  const Sum sum{out.data(), Dtype::kFp32, sources, Dtype::kFp32, 50001};
  EXPECT_NEAR(sum_chunks_and_squares(sum) / (50001 * 9e76), 1.0, 1e-6);
  source[40000] = NAN;
  EXPECT_FALSE(std::isfinite(sum_chunks_and_squares(sum)));
}

TEST(SumChunks, SquaresDoNotDependOnThreads) {
  // More blocks than one round has.
  const int64_t numel = 17'000'011;
  std::vector<c10::BFloat16> source(numel);
  for (int64_t i = 0; i < numel; ++i) source[i] = 1e-3F * static_cast<float>(i % 9973);
  const std::vector<const void*> sources = {source.data()};
  std::vector<c10::BFloat16> out(numel);
  const Sum sum{out.data(), Dtype::kBf16, sources, Dtype::kBf16, numel};
  const int before = at::get_num_threads();
  std::set<double> results;
  for (const int count : {1, 2, 5}) {
    at::set_num_threads(count);
    results.insert(sum_chunks_and_squares(sum));
  }
  at::set_num_threads(before);
  EXPECT_EQ(results.size(), 1U);
}

TEST(SumChunks, NoSourcesIsABug) {
  float out = 0;
  EXPECT_THROW(sum_chunks({&out, Dtype::kFp32, {}, Dtype::kFp32, 1}), Bug);
  EXPECT_THROW(sum_chunks_and_squares({&out, Dtype::kFp32, {}, Dtype::kFp32, 1}), Bug);
}

}  // namespace
}  // namespace penstock::device
