// sum_squares(), first_nonfinite() and take(). This file is compiled once per instruction set
// (foreach_target.h); the optimizers are in kernels_update.cpp.
#include "src/optim/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/optim/kernels.cpp"
#include <hwy/foreach_target.h>

// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "src/optim/split.h"
#include "src/place/dtype_simd.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::optim::HWY_NAMESPACE {

namespace simd = penstock::HWY_NAMESPACE;
namespace hn = hwy::HWY_NAMESPACE;
using F64 = hn::ScalableTag<double>;
using F32 = hn::ScalableTag<float>;

// Squares of fp32 values are exact in double, so only the order of the additions matters: four
// partial sums, always from the start of a block.
template <class T>
HWY_NOINLINE double sum_squares_of(const T* values, int64_t numel) {
  const F64 d;
  const hn::Rebind<float, F64> d32;
  constexpr size_t kLanes = hn::MaxLanes(F64());
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t i = 0;
  for (; i + 4 * lanes <= numel; i += 4 * lanes) {
    const auto x0 = hn::PromoteTo(d, simd::load_fp32(d32, values + i));
    const auto x1 = hn::PromoteTo(d, simd::load_fp32(d32, values + i + lanes));
    const auto x2 = hn::PromoteTo(d, simd::load_fp32(d32, values + i + 2 * lanes));
    const auto x3 = hn::PromoteTo(d, simd::load_fp32(d32, values + i + 3 * lanes));
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
    sum2 = hn::MulAdd(x2, x2, sum2);
    sum3 = hn::MulAdd(x3, x3, sum3);
  }
  while (i < numel) {
    HWY_ALIGN T rest[kLanes] = {};
    const int64_t count = std::min(lanes, numel - i);
    std::memcpy(rest, values + i, static_cast<size_t>(count) * sizeof(T));
    const auto x = hn::PromoteTo(d, simd::load_fp32(d32, rest));
    sum0 = hn::MulAdd(x, x, sum0);
    i += count;
  }
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

double sum_squares_part(const void* values, Dtype dtype, int64_t begin, int64_t end) {
  double sum = 0.0;
  simd::visit_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    sum = sum_squares_of(static_cast<const T*>(values) + begin, end - begin);
  });
  return sum;
}

// Inf and NaN are the values whose exponent bits (`mask`) are all set.
template <class Word>
HWY_NOINLINE int64_t find_masked(const Word* words, int64_t begin, int64_t end, Word mask) {
  const hn::ScalableTag<Word> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto all = hn::Set(d, mask);
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const auto word = hn::LoadU(d, words + i);
    if (!hn::AllFalse(d, hn::Eq(hn::And(word, all), all))) break;
  }
  for (; i < end; ++i) {
    if ((words[i] & mask) == mask) return i;
  }
  return -1;
}

int64_t first_nonfinite_part(const void* values, Dtype dtype, int64_t begin, int64_t end) {
  if (dtype == Dtype::kFp32) {
    return find_masked(static_cast<const uint32_t*>(values), begin, end, uint32_t{0x7F800000});
  }
  const uint16_t mask = dtype == Dtype::kBf16 ? 0x7F80 : 0x7C00;
  return find_masked(static_cast<const uint16_t*>(values), begin, end, mask);
}

template <bool kAccumulate, class Dst, class Src>
HWY_INLINE void take_vector(Dst* dst, const Src* src) {
  const F32 d;
  auto value = simd::load_fp32(d, src);
  if constexpr (kAccumulate) value = hn::Add(simd::load_fp32(d, dst), value);
  simd::store_fp32<false>(d, value, dst);
}

template <bool kAccumulate, class Dst, class Src>
HWY_NOINLINE void take_values(Dst* dst, const Src* src, int64_t numel) {
  constexpr size_t kLanes = hn::MaxLanes(F32());
  const auto lanes = static_cast<int64_t>(hn::Lanes(F32()));
  int64_t i = 0;
  for (; i + lanes <= numel; i += lanes) take_vector<kAccumulate>(dst + i, src + i);
  if (i == numel) return;
  HWY_ALIGN Dst dst_rest[kLanes] = {};
  HWY_ALIGN Src src_rest[kLanes] = {};
  const auto count = static_cast<size_t>(numel - i);
  std::memcpy(dst_rest, dst + i, count * sizeof(Dst));
  std::memcpy(src_rest, src + i, count * sizeof(Src));
  take_vector<kAccumulate>(dst_rest, src_rest);
  std::memcpy(dst + i, dst_rest, count * sizeof(Dst));
}

void take_part(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t begin,
               int64_t end, bool accumulate) {
  simd::visit_dtype(dst_dtype, [&](auto dst_type) {
    simd::visit_dtype(src_dtype, [&](auto src_type) {
      auto* to = static_cast<typename decltype(dst_type)::type*>(dst) + begin;
      const auto* from = static_cast<const typename decltype(src_type)::type*>(src) + begin;
      if (accumulate) {
        take_values<true>(to, from, end - begin);
      } else {
        take_values<false>(to, from, end - begin);
      }
    });
  });
}

}  // namespace penstock::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::optim {
namespace {

HWY_EXPORT(sum_squares_part);
HWY_EXPORT(first_nonfinite_part);
HWY_EXPORT(take_part);

double sum_of_block(const void* values, Dtype dtype, int64_t numel, int64_t block) {
  return HWY_DYNAMIC_DISPATCH(sum_squares_part)(values, dtype, block * kBlock,
                                                std::min((block + 1) * kBlock, numel));
}

}  // namespace

double sum_squares(const void* values, Dtype dtype, int64_t numel) {
  const int64_t num_blocks = (numel + kBlock - 1) / kBlock;
  double sum = 0.0;
  if (numel < kSerialBelow) {
    for (int64_t b = 0; b < num_blocks; ++b) sum += sum_of_block(values, dtype, numel, b);
    return sum;
  }
  std::vector<double> sums(static_cast<size_t>(num_blocks));
  for_each_part(numel, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin / kBlock; b * kBlock < end; ++b) {
      sums[static_cast<size_t>(b)] = sum_of_block(values, dtype, numel, b);
    }
  });
  for (const double value : sums) sum += value;
  return sum;
}

int64_t first_nonfinite(const void* values, Dtype dtype, int64_t numel) {
  std::atomic<int64_t> first{numel};
  for_each_part(numel, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end && b < first.load(); b += kBlock) {
      const int64_t found =
          HWY_DYNAMIC_DISPATCH(first_nonfinite_part)(values, dtype, b, std::min(b + kBlock, end));
      if (found < 0) continue;
      int64_t seen = first.load();
      while (found < seen && !first.compare_exchange_weak(seen, found)) {
      }
      return;
    }
  });
  return first == numel ? -1 : first.load();
}

void take(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t numel,
          bool accumulate) {
  for_each_part(numel, [&](int64_t begin, int64_t end) {
    if (dst_dtype == src_dtype && !accumulate) {
      const int64_t bytes = dtype_bytes(dst_dtype);
      std::memmove(static_cast<char*>(dst) + begin * bytes,
                   static_cast<const char*>(src) + begin * bytes,
                   static_cast<size_t>((end - begin) * bytes));
      return;
    }
    HWY_DYNAMIC_DISPATCH(take_part)(dst, dst_dtype, src, src_dtype, begin, end, accumulate);
  });
}

}  // namespace penstock::optim
#endif
