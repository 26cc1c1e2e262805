// sum_squares(), first_nonfinite() and take(). foreach_target.h compiles this file once per
// instruction set.
#include "src/device/host_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/device/host_kernels.cpp"
#include <hwy/foreach_target.h>

// Must come after foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "src/device/split.h"
#include "src/simd/dtypes.h"
#include "src/simd/squares.h"

#ifndef PENSTOCK_HOST_KERNELS_ONCE_
#define PENSTOCK_HOST_KERNELS_ONCE_
namespace penstock::device::host {

struct Taking {
  void* dst;
  Dtype dst_dtype;
  const void* src;
  Dtype src_dtype;
  bool accumulate;
};

}  // namespace penstock::device::host
#endif

HWY_BEFORE_NAMESPACE();
namespace penstock::device::host::HWY_NAMESPACE {

namespace simd = penstock::HWY_NAMESPACE;
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
static_assert(kBlock == simd::kSquaresBlock);

// Sums one block of [Note: Squares].
template <class T>
HWY_NOINLINE double sum_squares_of(const T* values, int64_t numel) {
  simd::BlockSquares squares;
  simd::add_squares(values, numel, squares);
  return simd::total(squares);
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

// The last vector is incomplete. It is padded in two local arrays, so that the same code computes
// it and gives the same bits.
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

void take_part(const Taking& taking, int64_t begin, int64_t end) {
  if (taking.dst_dtype == taking.src_dtype && !taking.accumulate) {
    const int64_t bytes = dtype_bytes(taking.dst_dtype);
    std::memmove(static_cast<char*>(taking.dst) + begin * bytes,
                 static_cast<const char*>(taking.src) + begin * bytes,
                 static_cast<size_t>((end - begin) * bytes));
    return;
  }
  simd::visit_dtype(taking.dst_dtype, [&](auto dst_type) {
    simd::visit_dtype(taking.src_dtype, [&](auto src_type) {
      auto* to = static_cast<typename decltype(dst_type)::type*>(taking.dst) + begin;
      const auto* from = static_cast<const typename decltype(src_type)::type*>(taking.src) + begin;
      if (taking.accumulate) {
        take_values<true>(to, from, end - begin);
      } else {
        take_values<false>(to, from, end - begin);
      }
    });
  });
}

// Works in tiles that fit the first-level cache, so that both passes read memory only once.
bool take_checked_part(const Taking& taking, int64_t begin, int64_t end) {
  constexpr int64_t kTile = 2048;
  bool finite = true;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t to = std::min(at + kTile, end);
    finite = finite && first_nonfinite_part(taking.src, taking.src_dtype, at, to) < 0;
    take_part(taking, at, to);
  }
  return finite;
}

}  // namespace penstock::device::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::device::host {
namespace {

HWY_EXPORT(sum_squares_part);
HWY_EXPORT(first_nonfinite_part);
HWY_EXPORT(take_part);
HWY_EXPORT(take_checked_part);

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
  // Any thread may sum a block. One thread then adds the block sums in order.
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
  const Taking taking{dst, dst_dtype, src, src_dtype, accumulate};
  for_each_part(numel, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(take_part)(taking, begin, end);
  });
}

bool take_checked(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t numel,
                  bool accumulate) {
  const Taking taking{dst, dst_dtype, src, src_dtype, accumulate};
  std::atomic<bool> finite = true;
  for_each_part(numel, [&](int64_t begin, int64_t end) {
    if (!HWY_DYNAMIC_DISPATCH(take_checked_part)(taking, begin, end)) finite = false;
  });
  return finite;
}

}  // namespace penstock::device::host
#endif
