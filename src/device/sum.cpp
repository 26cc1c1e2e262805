// foreach_target.h compiles this file once per instruction set.
#include "src/device/sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/device/sum.cpp"
#include <hwy/foreach_target.h>

// Must come after foreach_target.h.
#include <ATen/Parallel.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "penstock/error.h"
#include "src/device/kernels.h"
#include "src/simd/dtypes.h"
#include "src/simd/squares.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::device::HWY_NAMESPACE {

namespace simd = penstock::HWY_NAMESPACE;
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;

// Values per tile. The tile of sums stays in the first-level cache, so every source is read once.
// The written values also stay there until they are squared; with larger tiles, 32 KiB would be too
// small for both.
constexpr int64_t kTile = 512;
constexpr int64_t kBlock = simd::kSquaresBlock;

template <class Src>
HWY_NOINLINE void add_to_tile(float* HWY_RESTRICT tile, const Src* source, int64_t count,
                              bool first) {
  const F32 d;
  constexpr size_t kLanes = hn::MaxLanes(F32());
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if (first) {
    for (; i + lanes <= count; i += lanes) hn::Store(simd::load_fp32(d, source + i), d, tile + i);
  } else {
    for (; i + lanes <= count; i += lanes) {
      hn::Store(hn::Add(hn::Load(d, tile + i), simd::load_fp32(d, source + i)), d, tile + i);
    }
  }
  if (i == count) return;
  HWY_ALIGN Src rest[kLanes] = {};
  std::memcpy(rest, source + i, static_cast<size_t>(count - i) * sizeof(Src));
  const auto value = simd::load_fp32(d, rest);
  hn::Store(first ? value : hn::Add(hn::Load(d, tile + i), value), d, tile + i);
}

template <bool kAccumulate, class Dst>
HWY_INLINE void finish_vector(const float* tile, Dst* dst, float scale) {
  const F32 d;
  const auto factor = hn::Set(d, scale);
  const auto sum = hn::Load(d, tile);
  if constexpr (kAccumulate) {
    simd::store_fp32<false>(d, hn::MulAdd(sum, factor, simd::load_fp32(d, dst)), dst);
  } else {
    simd::store_fp32<false>(d, hn::Mul(sum, factor), dst);
  }
}

template <bool kAccumulate, class Dst>
HWY_NOINLINE void finish_tile(const float* HWY_RESTRICT tile, Dst* dst, int64_t count,
                              float scale) {
  constexpr size_t kLanes = hn::MaxLanes(F32());
  const auto lanes = static_cast<int64_t>(hn::Lanes(F32()));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) finish_vector<kAccumulate>(tile + i, dst + i, scale);
  if (i == count) return;
  HWY_ALIGN Dst rest[kLanes] = {};
  const size_t bytes = static_cast<size_t>(count - i) * sizeof(Dst);
  std::memcpy(rest, dst + i, bytes);
  finish_vector<kAccumulate>(tile + i, rest, scale);
  std::memcpy(dst + i, rest, bytes);
}

template <class Dst, class Src>
double sum_block(const Sum& sum, int64_t begin, int64_t end, bool with_squares) {
  HWY_ALIGN float tile[kTile];
  simd::BlockSquares squares;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t count = std::min(kTile, end - at);
    bool first = true;
    for (const void* source : sum.sources) {
      add_to_tile(tile, static_cast<const Src*>(source) + at, count, first);
      first = false;
    }
    Dst* dst = static_cast<Dst*>(static_cast<void*>(sum.dst.data)) + at;
    if (sum.accumulate) {
      finish_tile<true>(tile, dst, count, sum.scale);
    } else {
      finish_tile<false>(tile, dst, count, sum.scale);
    }
    if (with_squares) simd::add_squares(dst, count, squares);
  }
  return simd::total(squares);
}

// If `squares` is not null, it receives one value per block.
void sum_blocks(const Sum& sum, int64_t first, int64_t last, double* squares) {
  simd::visit_dtype(sum.dst_dtype, [&](auto dst_type) {
    simd::visit_dtype(sum.dtype, [&](auto src_type) {
      using Dst = typename decltype(dst_type)::type;
      using Src = typename decltype(src_type)::type;
      for (int64_t block = first; block < last; ++block) {
        const int64_t end = std::min((block + 1) * kBlock, sum.numel);
        const double sum_of_block =
            sum_block<Dst, Src>(sum, block * kBlock, end, squares != nullptr);
        if (squares != nullptr) squares[block - first] = sum_of_block;
      }
    });
  });
}

}  // namespace penstock::device::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::device {

namespace {

HWY_EXPORT(sum_blocks);
constexpr int64_t kBlock = HWY_NAMESPACE::kBlock;

int64_t num_blocks(const Sum& sum) {
  PENSTOCK_ASSERT(!sum.sources.empty(), "no sources to sum");
  return (sum.numel + kBlock - 1) / kBlock;
}

void sum_range(const Sum& sum, int64_t first, int64_t last, double* squares) {
  const auto run = [&](int64_t begin, int64_t end) {
    double* part = squares == nullptr ? nullptr : squares + (begin - first);
    HWY_DYNAMIC_DISPATCH(sum_blocks)(sum, begin, end, part);
  };
  if (sum.numel < 2 * kBlock) {  // starting threads costs more than the work
    run(first, last);
  } else {
    at::parallel_for(first, last, 1, run);
  }
}

}  // namespace

void sum_chunks(const Sum& sum) {
  if (sum.dst.device != nullptr) return sum_on_device(sum);
  sum_range(sum, 0, num_blocks(sum), nullptr);
}

double sum_chunks_and_squares(const Sum& sum, double before) {
  // Blocks per round: the values of one round fit on the stack.
  constexpr int64_t kRound = 1024;
  std::array<double, kRound> squares{};
  double total = before;
  for (int64_t first = 0; first < num_blocks(sum); first += kRound) {
    const int64_t last = std::min(first + kRound, num_blocks(sum));
    sum_range(sum, first, last, squares.data());
    for (int64_t i = 0; i < last - first; ++i) total += squares[static_cast<size_t>(i)];
  }
  return total;
}

}  // namespace penstock::device
#endif
