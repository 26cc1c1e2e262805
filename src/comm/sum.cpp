// Compiled once per instruction set (foreach_target.h).
#include "src/comm/sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/comm/sum.cpp"
#include <hwy/foreach_target.h>

// After foreach_target.h.
#include <ATen/Parallel.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "penstock/error.h"
#include "src/place/dtype_simd.h"

#ifndef PENSTOCK_COMM_SUM_ONCE_
#define PENSTOCK_COMM_SUM_ONCE_
namespace penstock::comm {

struct SumArgs {
  void* dst;
  Dtype dst_dtype;
  const std::vector<const void*>& sources;
  Dtype dtype;
  float scale;
  bool accumulate;
};

}  // namespace penstock::comm
#endif

HWY_BEFORE_NAMESPACE();
namespace penstock::comm::HWY_NAMESPACE {

namespace simd = penstock::HWY_NAMESPACE;
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;

// Sums are made in a tile that stays in the first cache: any number of sources is read once.
constexpr int64_t kTile = 2048;

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
void sum_values(const SumArgs& args, int64_t begin, int64_t end) {
  HWY_ALIGN float tile[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t count = std::min(kTile, end - at);
    bool first = true;
    for (const void* source : args.sources) {
      add_to_tile(tile, static_cast<const Src*>(source) + at, count, first);
      first = false;
    }
    Dst* dst = static_cast<Dst*>(args.dst) + at;
    if (args.accumulate) {
      finish_tile<true>(tile, dst, count, args.scale);
    } else {
      finish_tile<false>(tile, dst, count, args.scale);
    }
  }
}

void sum_part(const SumArgs& args, int64_t begin, int64_t end) {
  simd::visit_dtype(args.dst_dtype, [&](auto dst_type) {
    simd::visit_dtype(args.dtype, [&](auto src_type) {
      sum_values<typename decltype(dst_type)::type, typename decltype(src_type)::type>(args, begin,
                                                                                       end);
    });
  });
}

}  // namespace penstock::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::comm {

HWY_EXPORT(sum_part);

void sum_chunks(void* dst, Dtype dst_dtype, const std::vector<const void*>& sources, Dtype dtype,
                int64_t numel, float scale, bool accumulate) {
  PENSTOCK_ASSERT(!sources.empty(), "no sources to sum");
  constexpr int64_t kBlock = 16 * 1024;
  const SumArgs args{dst, dst_dtype, sources, dtype, scale, accumulate};
  const auto run = [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(sum_part)(args, begin, end);
  };
  if (numel < 2 * kBlock) {
    if (numel > 0) run(0, numel);
    return;
  }
  at::parallel_for(0, (numel + kBlock - 1) / kBlock, 1, [&](int64_t first, int64_t last) {
    run(first * kBlock, std::min(last * kBlock, numel));
  });
}

}  // namespace penstock::comm
#endif
