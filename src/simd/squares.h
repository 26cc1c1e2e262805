// The sum of squares of one block of values, for SIMD kernels (Highway) of the layers above.
// foreach_target.h includes this file once per instruction set, so its guard toggles.
//
// [Note: Squares] Squares of fp32 values are exact in double, so only the order of the additions
// matters. That order is fixed: each block of 16 * 1024 values is summed separately, in four
// partial sums from its start, and the block sums are then added in order. So a norm has the same
// bits for any number of threads. Its bits are also the same whether it is computed in the pass
// that writes the values (device::sum_chunks_and_squares) or in a separate pass
// (device::host::sum_squares). The sum of finite values is finite; with an Inf or a NaN, the
// sum is not finite.
#if defined(PENSTOCK_PLACE_SQUARES_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PENSTOCK_PLACE_SQUARES_SIMD_H_
#undef PENSTOCK_PLACE_SQUARES_SIMD_H_
#else
#define PENSTOCK_PLACE_SQUARES_SIMD_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "src/simd/dtypes.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kSquaresBlock = 16 * 1024;  // values

struct BlockSquares {
  HWY_ALIGN double sums[4 * hn::MaxLanes(hn::ScalableTag<double>())] = {};
};

// Adds the squares of one piece of a block. `count` is a multiple of 32 except in a block's last
// piece. Must be inlined: across a call, GCC 12 (-fipa-modref) loses three of the four partial
// sums.
template <class T>
HWY_INLINE void add_squares(const T* values, int64_t count, BlockSquares& squares) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, hn::ScalableTag<double>> d32;
  constexpr size_t kLanes = hn::MaxLanes(hn::ScalableTag<double>());
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  double* sums = squares.sums;
  auto sum0 = hn::Load(d, sums), sum1 = hn::Load(d, sums + lanes);
  auto sum2 = hn::Load(d, sums + 2 * lanes), sum3 = hn::Load(d, sums + 3 * lanes);
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const auto x0 = hn::PromoteTo(d, load_fp32(d32, values + i));
    const auto x1 = hn::PromoteTo(d, load_fp32(d32, values + i + lanes));
    const auto x2 = hn::PromoteTo(d, load_fp32(d32, values + i + 2 * lanes));
    const auto x3 = hn::PromoteTo(d, load_fp32(d32, values + i + 3 * lanes));
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
    sum2 = hn::MulAdd(x2, x2, sum2);
    sum3 = hn::MulAdd(x3, x3, sum3);
  }
  while (i < count) {
    HWY_ALIGN T rest[kLanes] = {};
    const int64_t left = std::min(lanes, count - i);
    std::memcpy(rest, values + i, static_cast<size_t>(left) * sizeof(T));
    const auto x = hn::PromoteTo(d, load_fp32(d32, rest));
    sum0 = hn::MulAdd(x, x, sum0);
    i += left;
  }
  hn::Store(sum0, d, sums);
  hn::Store(sum1, d, sums + lanes);
  hn::Store(sum2, d, sums + 2 * lanes);
  hn::Store(sum3, d, sums + 3 * lanes);
}

HWY_INLINE double total(const BlockSquares& squares) {
  const hn::ScalableTag<double> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const double* sums = squares.sums;
  const auto low = hn::Add(hn::Load(d, sums), hn::Load(d, sums + lanes));
  const auto high = hn::Add(hn::Load(d, sums + 2 * lanes), hn::Load(d, sums + 3 * lanes));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(low, high)));
}

}  // namespace penstock::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // PENSTOCK_PLACE_SQUARES_SIMD_H_
