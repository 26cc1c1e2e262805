#pragma once
// Values in the memory of the device: fp32, bf16 and fp16, and their conversions. The conversions
// use integer arithmetic and give the bits of src/simd/dtypes.h on every device: rounding is to
// nearest even, and NaN becomes the canonical quiet NaN.
#include <cstdint>

#include "runtime.h"

namespace penstock::fused {

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

struct NoParam {};  // the type of the output if a run has no output

PENSTOCK_FUSED_CODE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
PENSTOCK_FUSED_CODE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

PENSTOCK_FUSED_CODE float to_fp32(float value) { return value; }

PENSTOCK_FUSED_CODE float to_fp32(Bf16 value) { return float_of(uint32_t{value.bits} << 16); }

PENSTOCK_FUSED_CODE float to_fp32(Fp16 value) {
  constexpr uint32_t kRebias = 112u << 23;  // the difference of the exponents' biases
  const uint32_t magnitude = value.bits & 0x7FFFu;
  const uint32_t sign = (value.bits ^ magnitude) << 16;
  if (magnitude < 0x0400u) {  // subnormal in fp16, normal or zero in fp32
    return float_of(bits_of(static_cast<float>(magnitude) * 0x1p-24F) | sign);
  }
  const uint32_t bits = (magnitude << 13) + kRebias;
  return float_of((magnitude > 0x7BFFu ? bits + kRebias : bits) | sign);  // infinity, NaN
}

PENSTOCK_FUSED_CODE void from_fp32(float value, float& to) { to = value; }

PENSTOCK_FUSED_CODE void from_fp32(float value, Bf16& to) {
  const uint32_t bits = bits_of(value);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  to.bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

PENSTOCK_FUSED_CODE void from_fp32(float value, Fp16& to) {
  constexpr uint32_t kRebias = 112u << 23;
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - kRebias) >> 13;
  if (magnitude < 0x38800000u) {
    // Adding 0.5, whose last bit is worth 2^-24, rounds to a multiple of the smallest subnormal.
    half = bits_of(float_of(magnitude) + 0.5F) - 0x3F000000u;
  }
  if (magnitude > 0x477FFFFFu) half = 0x7C00u;
  if (magnitude > 0x7F800000u) half = 0x7E00u;
  to.bits = static_cast<uint16_t>(half | (bits ^ magnitude) >> 16);
}

// Four values that are read or written by one instruction: 16 bytes of fp32, 8 bytes of bf16 or
// fp16. Their address must be a multiple of that size.
inline constexpr int kLanes = 4;
template <class T>
struct alignas(kLanes * sizeof(T)) Quad {
  T at[kLanes];
};

template <class T>
PENSTOCK_FUSED_CODE Quad<T> load_quad(const T* from) {
  return *reinterpret_cast<const Quad<T>*>(from);
}

PENSTOCK_FUSED_CODE void store_quad(const Quad<float>& values, float* to) {
  *reinterpret_cast<Quad<float>*>(to) = values;
}

// nvcc stores the four values of a Quad<Bf16> one by one if they are not in one word.
template <class T>
PENSTOCK_FUSED_CODE void store_quad(const Quad<T>& values, T* to) {
  static_assert(sizeof(T) == 2);
  using Word [[gnu::may_alias]] = uint64_t;
  uint64_t word = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    word |= uint64_t{values.at[lane].bits} << (16 * lane);
  }
  *reinterpret_cast<Word*>(to) = word;
}

}  // namespace penstock::fused
