// Loads and stores of fp32 vectors from and to memory of any Dtype, for SIMD kernels (Highway).
// foreach_target.h includes this file once per instruction set, so it has a guard that toggles and
// no `#pragma once`. Values are rounded to nearest even, to the same bits as torch's casts; NaN
// becomes the canonical quiet NaN (bf16 0x7FC0, fp16 sign | 0x7E00). Float arithmetic is used only
// where no result is subnormal; all other steps use integer arithmetic. So every instruction set
// gives the same bits, and subnormal values survive a flush-to-zero mode.
#if defined(PENSTOCK_SIMD_DTYPES_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PENSTOCK_SIMD_DTYPES_H_
#undef PENSTOCK_SIMD_DTYPES_H_
#else
#define PENSTOCK_SIMD_DTYPES_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>

#include "penstock/error.h"
#include "src/place/placement.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Bf16 = hwy::bfloat16_t;
using Fp16 = hwy::float16_t;
template <class D>
using VecOf = hn::Vec<D>;
template <class D>
using Bits16 = hn::Rebind<uint16_t, D>;
template <class D>
using Bits32 = hn::RebindToUnsigned<D>;

// Reads Lanes(d) values at any alignment. `d` is a tag of float lanes.
template <class D>
HWY_INLINE VecOf<D> load_fp32(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE VecOf<D> load_fp32(D d, const Bf16* from) {
  const auto half = hn::LoadU(Bits16<D>(), reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(Bits32<D>(), half)));
}

template <class D>
HWY_INLINE VecOf<D> load_fp32(D d, const Fp16* from) {
  const Bits32<D> du;
  const hn::RebindToSigned<D> di;
  const auto half =
      hn::PromoteTo(du, hn::LoadU(Bits16<D>(), reinterpret_cast<const uint16_t*>(from)));
  const auto magnitude = hn::And(half, hn::Set(du, 0x7FFFu));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(half, magnitude));
  const auto rebias = hn::Set(du, 112u << 23);
  auto bits = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  const auto is_special = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7BFF));
  bits = hn::IfThenElse(hn::RebindMask(du, is_special), hn::Add(bits, rebias), bits);
  const auto is_subnormal = hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 0x0400));
  const auto subnormal =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-24F));
  bits = hn::IfThenElse(hn::RebindMask(du, is_subnormal), hn::BitCast(du, subnormal), bits);
  return hn::BitCast(d, hn::Or(bits, sign));
}

template <class D>
HWY_INLINE hn::Vec<Bits16<D>> round_to_bf16(D d, VecOf<D> value) {
  const Bits32<D> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
  const auto result = hn::IfThenElse(is_nan, hn::Set(du, 0x7FC0u), rounded);
  (void)d;
  return hn::TruncateTo(Bits16<D>(), result);
}

template <class D>
HWY_INLINE hn::Vec<Bits16<D>> round_to_fp16(D d, VecOf<D> value) {
  const Bits32<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, value);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
  const auto order = hn::BitCast(di, magnitude);
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto biased = hn::Sub(hn::Add(magnitude, hn::Set(du, 0xFFFu)), hn::Set(du, 112u << 23));
  auto result = hn::ShiftRight<13>(hn::Add(biased, odd));
  // Adding 0.5, whose last bit is worth 2^-24, rounds to a multiple of the smallest subnormal.
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5F))),
              hn::Set(du, 0x3F000000u));
  const auto is_small = hn::RebindMask(du, hn::Lt(order, hn::Set(di, 0x38800000)));
  result = hn::IfThenElse(is_small, subnormal, result);
  const auto is_large = hn::RebindMask(du, hn::Gt(order, hn::Set(di, 0x477FFFFF)));
  result = hn::IfThenElse(is_large, hn::Set(du, 0x7C00u), result);
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
  result = hn::IfThenElse(is_nan, hn::Set(du, 0x7E00u), result);
  const auto sign = hn::ShiftRight<16>(hn::AndNot(hn::Set(du, 0x7FFFFFFFu), bits));
  return hn::TruncateTo(Bits16<D>(), hn::Or(result, sign));
}

// Writes Lanes(d) values. kStream writes past the caches; `to` must then be aligned to the whole
// vector, and FlushStream() must be called before another thread reads. Vectors shorter than
// HWY_STREAM_MULTIPLE bytes are stored normally, because Stream() would write past their end.
template <bool kStream, class D, class T>
HWY_INLINE void store_lanes(D d, VecOf<D> value, T* to) {
  if constexpr (kStream && hn::MaxLanes(D()) * sizeof(T) >= HWY_STREAM_MULTIPLE) {
    hn::Stream(value, d, to);
  } else {
    hn::StoreU(value, d, to);
  }
}

template <bool kStream, class D>
HWY_INLINE void store_fp32(D d, VecOf<D> value, float* to) {
  store_lanes<kStream>(d, value, to);
}

template <bool kStream, class D>
HWY_INLINE void store_fp32(D d, VecOf<D> value, Bf16* to) {
  store_lanes<kStream>(Bits16<D>(), round_to_bf16(d, value), reinterpret_cast<uint16_t*>(to));
}

template <bool kStream, class D>
HWY_INLINE void store_fp32(D d, VecOf<D> value, Fp16* to) {
  store_lanes<kStream>(Bits16<D>(), round_to_fp16(d, value), reinterpret_cast<uint16_t*>(to));
}

template <class T>
struct TypeOf {
  using type = T;
};

// Calls visit(TypeOf<T>()) with the memory type of `dtype`. The visitor must not use vectors
// itself (a lambda does not inherit the instruction set).
template <class Visit>
void visit_dtype(Dtype dtype, const Visit& visit) {
  switch (dtype) {
    case Dtype::kFp32:
      return visit(TypeOf<float>());
    case Dtype::kBf16:
      return visit(TypeOf<Bf16>());
    case Dtype::kFp16:
      return visit(TypeOf<Fp16>());
    case Dtype::kInt8:
    case Dtype::kInt4:
      break;
  }
  PENSTOCK_ASSERT(false, "[simd::visit_dtype] the values are quantized");
}

}  // namespace penstock::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // PENSTOCK_SIMD_DTYPES_H_
