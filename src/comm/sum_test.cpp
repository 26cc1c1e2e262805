#include "src/comm/sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "penstock/error.h"

namespace penstock::comm {
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

// `numel` random values, one value into the buffer (misaligned), with room behind.
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
  sum_chunks(dst.data() + dtype_bytes(c.dst), c.dst, sources, c.src, c.numel, scale, c.accumulate);
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
  sum_chunks(b.data(), Dtype::kFp32, {a.data(), b.data()}, Dtype::kFp32, 70001, 0.5F, false);
  for (const float value : b) ASSERT_EQ(value, 1.5F);
}

TEST(SumChunks, InfAndNanPass) {
  std::vector<float> a(21, INFINITY), b(21, -INFINITY), out(21);
  sum_chunks(out.data(), Dtype::kFp32, {a.data()}, Dtype::kFp32, 21, 1.0F, false);
  for (const float value : out) EXPECT_EQ(value, INFINITY);
  sum_chunks(out.data(), Dtype::kFp32, {a.data(), b.data()}, Dtype::kFp32, 21, 1.0F, false);
  for (const float value : out) EXPECT_TRUE(std::isnan(value));
}

TEST(SumChunks, NoSourcesIsABug) {
  float out = 0;
  EXPECT_THROW(sum_chunks(&out, Dtype::kFp32, {}, Dtype::kFp32, 1, 1.0F, false), Bug);
}

}  // namespace
}  // namespace penstock::comm
