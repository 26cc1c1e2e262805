// foreach_target.h compiles this file once per instruction set.
#include "src/device/wire_codec.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/device/wire_codec.cpp"
#include <hwy/foreach_target.h>

// Must come after foreach_target.h.
#include <ATen/ops/empty.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "penstock/error.h"
#include "src/device/device.h"
#include "src/device/device_codec.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"
#include "src/device/split.h"
#include "src/device/wire_blocks.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::device::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;  // at most half a block
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using I8 = hn::Rebind<int8_t, F32>;
constexpr int64_t kGroup = 16;            // values whose signs take two bytes
using Pairs = hn::ScalableTag<uint16_t>;  // a pair of values as two bytes
using Packed = hn::Rebind<uint8_t, Pairs>;

constexpr int64_t kMostBlock = 128;
constexpr int64_t kLine = 64;  // bytes of a cache line

// Fetches memory that will be used soon. A processor's own prefetching ends at a page, which is
// about as long as a tile.
HWY_INLINE void prefetch(const Ahead& ahead, int64_t begin, int64_t count) {
  for (const Ahead::Stream& stream : ahead.streams) {
    const int64_t end = (begin + count) * stream.size;
    for (int64_t at = begin * stream.size; at < end; at += kLine) hwy::Prefetch(stream.data + at);
  }
}

// Returns the bits of the largest magnitude. The order of bits is the order of magnitudes, and NaN
// is above infinity. `count` is a multiple of the lanes.
HWY_INLINE uint32_t largest_bits(const float* values, int64_t count) {
  const F32 d;
  const U32 du;
  auto most = hn::Zero(du);
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto bits = hn::BitCast(du, hn::LoadU(d, values + i));
    most = hn::Max(most, hn::And(bits, hn::Set(du, 0x7FFFFFFFU)));
  }
  return hn::GetLane(hn::MaxOfLanes(du, most));
}

// Returns numbers in [0, 1), a function of the keys and the indices. They have 16 bits, so that a
// whole number of levels plus such a number is exact in fp32.
HWY_INLINE hn::Vec<F32> random_numbers(hn::Vec<U32> indices, const Keys& keys) {
  const F32 d;
  const U32 du;
  auto x = hn::Xor(indices, hn::Set(du, keys.low));
  x = hn::Add(hn::Mul(x, hn::Set(du, 0x9E3779B9U)), hn::Set(du, keys.high));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(du, 0x85EBCA6BU));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<13>(x)), hn::Set(du, 0xC2B2AE35U));
  x = hn::ShiftRight<16>(hn::Xor(x, hn::ShiftRight<16>(x)));
  return hn::Mul(hn::ConvertTo(d, hn::BitCast(I32(), x)), hn::Set(d, 0x1p-16F));
}

template <bool kStochastic>
HWY_INLINE void round_block(const float* values, const Wire& wire, float inverse, const Keys& keys,
                            uint32_t first, int8_t* rounded) {
  const F32 d;
  const I32 di;
  const auto factor = hn::Set(d, inverse);
  const auto most = hn::Set(di, wire.levels()), least = hn::Set(di, -wire.levels());
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const U32 du;
  const auto from_zero = hn::Iota(du, 0);  // slow, so not in the loop
  for (int64_t i = 0; i < wire.block; i += lanes) {
    const auto scaled = hn::Mul(hn::LoadU(d, values + i), factor);
    auto q = hn::Zero(di);
    if constexpr (kStochastic) {
      const auto indices = hn::Add(from_zero, hn::Set(du, first + static_cast<uint32_t>(i)));
      const auto noise = random_numbers(indices, keys);
      q = hn::ConvertTo(di, hn::Floor(hn::Add(scaled, noise)));
    } else {
      q = hn::NearestInt(scaled);
    }
    q = hn::Min(hn::Max(q, least), most);
    hn::StoreU(hn::DemoteTo(I8(), q), I8(), rounded + i);
  }
}

// Rounds scaled values to float8_e4m3fn, to nearest even. Integer arithmetic gives the same bits on
// every instruction set.
HWY_INLINE void round_to_fp8(const float* values, const Wire& wire, float inverse,
                             int8_t* rounded) {
  const F32 d;
  const I32 di;
  const U32 du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < wire.block; i += lanes) {
    const auto product = hn::Mul(hn::LoadU(d, values + i), hn::Set(d, inverse));
    const auto scaled = hn::IfThenZeroElse(hn::IsNaN(product), product);
    const auto bits = hn::BitCast(du, hn::Abs(scaled));
    // The step of values below 2^-6 is 2^-9.
    const auto small = hn::NearestInt(hn::Mul(hn::Abs(scaled), hn::Set(d, 0x1p9F)));
    const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1));
    const auto up = hn::ShiftRight<20>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFF))));
    const auto large = hn::Sub(hn::BitCast(di, up), hn::Set(di, 120 << 3));
    const auto is_small = hn::Lt(hn::BitCast(di, bits), hn::Set(di, 0x3C800000));
    auto code = hn::Min(hn::IfThenElse(is_small, small, large), hn::Set(di, 0x7E));
    const auto negative = hn::Lt(hn::BitCast(di, scaled), hn::Zero(di));
    code = hn::Sub(code, hn::IfThenElseZero(negative, hn::Set(di, 128)));
    hn::StoreU(hn::DemoteTo(I8(), code), I8(), rounded + i);
  }
}

HWY_INLINE hn::Vec<F32> values_of_fp8(hn::Vec<I32> codes) {
  const F32 d;
  const I32 di;
  const auto magnitude = hn::And(codes, hn::Set(di, 0x7F));
  const auto large = hn::BitCast(d, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(di, 120 << 23)));
  const auto small = hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-9F));
  const auto is_small = hn::RebindMask(d, hn::Lt(magnitude, hn::Set(di, 8)));
  const auto value = hn::IfThenElse(is_small, small, large);
  return hn::IfThenElse(hn::RebindMask(d, hn::Lt(codes, hn::Zero(di))), hn::Neg(value), value);
}

// Packs pairs of int8 into bytes. Reads and writes whole vectors.
HWY_INLINE void pack(const int8_t* rounded, int64_t count, uint8_t* packed) {
  const Pairs d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += 2 * lanes) {
    const auto pair = hn::LoadU(d, reinterpret_cast<const uint16_t*>(rounded + i));
    const auto low = hn::And(pair, hn::Set(d, 0x000F));
    const auto high = hn::And(hn::ShiftRight<4>(pair), hn::Set(d, 0x00F0));
    hn::StoreU(hn::TruncateTo(Packed(), hn::Or(low, high)), Packed(), packed + i / 2);
  }
}

HWY_INLINE void unpack(const uint8_t* packed, int64_t count, int8_t* values) {
  const Pairs d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += 2 * lanes) {
    const auto bytes = hn::PromoteTo(d, hn::LoadU(Packed(), packed + i / 2));
    const auto high = hn::And(hn::ShiftLeft<4>(bytes), hn::Set(d, 0x0F00));
    const auto halves = hn::Or(hn::And(bytes, hn::Set(d, 0x000F)), high);
    // 0x1E copies the sign of four bits to the upper half of its byte.
    const auto signs = hn::Mul(hn::And(halves, hn::Set(d, 0x0808)), hn::Set(d, 0x001E));
    hn::StoreU(hn::Or(halves, signs), d, reinterpret_cast<uint16_t*>(values + i));
  }
}

// Returns the sum of the magnitudes, each multiplied by `factor`. For every instruction set, the
// same sixteen partial sums are added up in the same order.
HWY_INLINE float sum_of_magnitudes(const float* values, int64_t count, float factor) {
  const F32 d;
  HWY_ALIGN float sums[kGroup] = {};
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t lane = 0; lane < kGroup; lane += lanes) {
    auto sum = hn::Zero(d);
    for (int64_t i = lane; i < count; i += kGroup) {
      sum = hn::Add(sum, hn::Mul(hn::Abs(hn::LoadU(d, values + i)), hn::Set(d, factor)));
    }
    hn::Store(sum, d, sums + lane);
  }
  for (int64_t half = kGroup / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

HWY_INLINE uint16_t signs_of(const float* values) {
  const F32 d;
  const U32 du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  uint32_t signs = 0;
  for (int64_t i = 0; i < kGroup; i += lanes) {
    const auto bits = hn::BitCast(du, hn::LoadU(d, values + i));
    const auto negative = hn::TestBit(bits, hn::Set(du, 0x80000000U));
    uint8_t stored[8] = {};
    hn::StoreMaskBits(du, negative, stored);
    const uint32_t part = stored[0] | static_cast<uint32_t>(stored[1]) << 8;
    signs |= (part & ((1U << lanes) - 1)) << i;
  }
  return static_cast<uint16_t>(signs);
}

void encode_signs(const float* values, int64_t count, const Wire& wire, Encoded to,
                  const Ahead& ahead) {
  const int block = wire.block;
  for (int64_t at = 0; at < count; at += block) {
    prefetch(ahead, at, block);
    const int64_t here = std::min<int64_t>(block, count - at);
    const uint32_t largest = largest_bits(values + at, block);
    const float sum = sum_of_magnitudes(values + at, block, 1.0F / static_cast<float>(block));
    const float scale = mean_of(largest, sum, block, here);
    to.scales[at / block] = scale;
    const bool has_signs = scale > 0.0F;  // not for zeros and NaN
    uint16_t signs[kMostBlock / kGroup] = {};
    for (int64_t i = 0; i < block && has_signs; i += kGroup) {
      signs[i / kGroup] = signs_of(values + at + i);
    }
    std::memcpy(to.values + at / 8, signs, static_cast<size_t>((here + 7) / 8));
  }
}

// Encodes the first `count` of `values`. These are whole blocks, padded with zeros.
void encode_blocks(const float* values, int64_t count, const Wire& wire, const Keys& keys,
                   Encoded to, const Ahead& ahead) {
  HWY_ALIGN int8_t rounded[kMostBlock + 64];
  HWY_ALIGN uint8_t packed[kMostBlock / 2 + 64];
  const int block = wire.block;
  if (wire.code == Code::kSign) return encode_signs(values, count, wire, to, ahead);
  for (int64_t at = 0; at < count; at += block) {
    prefetch(ahead, at, block);
    const int64_t here = std::min<int64_t>(block, count - at);
    const Scale scale = scale_of(largest_bits(values + at, block), wire.levels());
    to.scales[at / block] = scale.step;
    const uint32_t index = keys.first + static_cast<uint32_t>(at);
    if (wire.code == Code::kFp8) {
      round_to_fp8(values + at, wire, scale.inverse, rounded);
    } else if (wire.rounding == Rounding::kStochastic) {
      round_block<true>(values + at, wire, scale.inverse, keys, index, rounded);
    } else {
      round_block<false>(values + at, wire, scale.inverse, keys, index, rounded);
    }
    if (wire.code != Code::kInt4) {
      std::memcpy(to.values + at, rounded, static_cast<size_t>(here));
      continue;
    }
    if (here < block) std::fill(rounded + here, rounded + block, int8_t{0});
    pack(rounded, block, packed);
    std::memcpy(to.values + at / 2, packed, static_cast<size_t>((here + 1) / 2));
  }
}

// Sets `to` to the value, or adds or subtracts it.
template <class D>
HWY_INLINE void use(D d, hn::Vec<D> value, Decoded how, float* to) {
  if (how == Decoded::kAdd) value = hn::Add(hn::Load(d, to), value);
  if (how == Decoded::kSubtract) value = hn::Sub(hn::Load(d, to), value);
  hn::Store(value, d, to);
}

void use_signs(float* sums, int64_t count, const Wire& wire, const Encoded& from, Decoded how,
               const Ahead& ahead) {
  const F32 d;
  const U32 du;
  const int block = wire.block;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t at = 0; at < count; at += block) {
    prefetch(ahead, at, block);
    const int64_t here = std::min<int64_t>(block, count - at);
    uint16_t signs[kMostBlock / kGroup] = {};
    std::memcpy(signs, from.values + at / 8, static_cast<size_t>((here + 7) / 8));
    const auto scale = hn::Set(d, from.scales[at / block]);
    for (int64_t i = 0; i < block; i += lanes) {
      const uint32_t group = signs[i / kGroup];
      const auto bit = hn::Shl(hn::Set(du, 1), hn::Iota(du, static_cast<uint32_t>(i % kGroup)));
      const auto negative = hn::RebindMask(d, hn::TestBit(hn::Set(du, group), bit));
      const auto value = hn::IfThenElse(negative, hn::Neg(scale), scale);
      use(d, value, how, sums + at + i);
    }
  }
}

// sums[i] = or += or -= the decoded values. `sums` has room for whole blocks.
void use_decoded(float* sums, int64_t count, const Wire& wire, const Encoded& from, Decoded how,
                 const Ahead& ahead) {
  if (wire.code == Code::kSign) return use_signs(sums, count, wire, from, how, ahead);
  const F32 d;
  HWY_ALIGN int8_t block_values[kMostBlock + 64] = {};
  HWY_ALIGN uint8_t packed[kMostBlock / 2 + 64] = {};
  const int block = wire.block;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t at = 0; at < count; at += block) {
    prefetch(ahead, at, block);
    const int64_t here = std::min<int64_t>(block, count - at);
    const auto* values = reinterpret_cast<const int8_t*>(from.values) + at;
    if (wire.code == Code::kInt4) {
      std::memcpy(packed, from.values + at / 2, static_cast<size_t>((here + 1) / 2));
      unpack(packed, block, block_values);
      values = block_values;
    } else if (here < block) {
      std::memcpy(block_values, values, static_cast<size_t>(here));
      values = block_values;
    }
    const auto step = hn::Set(d, from.scales[at / block]);
    for (int64_t i = 0; i < block; i += lanes) {
      const auto q = hn::PromoteTo(I32(), hn::LoadU(I8(), values + i));
      const auto whole = wire.code == Code::kFp8 ? values_of_fp8(q) : hn::ConvertTo(d, q);
      use(d, hn::Mul(whole, step), how, sums + at + i);
    }
  }
}

void subtract(float* values, const float* base, int64_t count) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Sub(hn::LoadU(d, values + i), hn::LoadU(d, base + i)), d, values + i);
  }
  for (; i < count; ++i) values[i] -= base[i];
}

}  // namespace penstock::device::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::device {

namespace {

HWY_EXPORT(encode_blocks);
HWY_EXPORT(use_decoded);
HWY_EXPORT(subtract);

constexpr int64_t kTile = 2048;  // values that stay in the first-level cache, a multiple of blocks

// Calls run(begin, count) for tiles of a part.
template <class Run>
void for_each_tile(int64_t numel, const Run& run) {
  host::for_each_part(numel, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kTile) run(at, std::min(kTile, end - at));
  });
}

// Adds the residual of earlier encodings to a tile: only where it is idle, or only elsewhere.
void add_before(float* values, int64_t count, const Residual& residual, bool where_idle) {
  if (residual.before.data == nullptr) return;
  residual.for_each_range(count, [&](int64_t begin, int64_t end, bool idle) {
    if (idle != where_idle) return;
    const char* const before = residual.before.host() + begin * dtype_bytes(residual.dtype);
    host::take(values + begin, Dtype::kFp32, before, residual.dtype, end - begin, true);
  });
}

// `values` are the values that were encoded. A block that is not finite keeps its residual.
void leave_residual(float* values, int64_t count, const Wire& wire, const Encoded& encoded,
                    const Residual& residual) {
  add_before(values, count, residual, true);
  HWY_DYNAMIC_DISPATCH(use_decoded)(values, count, wire, encoded, Decoded::kSubtract, {});
  for (int64_t at = 0; at < count; at += wire.block) {
    if (!std::isnan(encoded.scales[at / wire.block])) continue;
    const int64_t here = std::min<int64_t>(wire.block, count - at);
    std::fill(values + at, values + at + here, 0.0F);
    const Residual block = residual.from(at);
    if (block.before.data == nullptr) continue;
    host::take(values + at, Dtype::kFp32, block.before.host(), block.dtype, here, false);
  }
  host::take(residual.after.host(), residual.dtype, values, Dtype::kFp32, count, false);
}

void encode_on_host(char* to, const PlainValues& values, const Wire& wire, const Noise& noise,
                    const Residual& residual) {
  const auto& [from, dtype, numel, base] = values;
  const Encoded all = Encoded::of(to, numel, wire);
  for_each_tile(numel, [&](int64_t at, int64_t count) {
    alignas(64) float tile[kTile], subtracted[kTile];
    const char* const source = from.host() + at * dtype_bytes(dtype);
    const auto* read = reinterpret_cast<const float*>(source);
    const bool changes = residual.kept() || base.data != nullptr;
    if (changes || dtype != Dtype::kFp32 || count % wire.block != 0) {
      host::take(tile, Dtype::kFp32, source, dtype, count, false);
      std::fill(tile + count, tile + (count + wire.block - 1) / wire.block * wire.block, 0.0F);
      read = tile;
    }
    if (base.data != nullptr) {
      host::take(subtracted, Dtype::kFp32, base.host() + at * dtype_bytes(dtype), dtype, count,
                 false);
      HWY_DYNAMIC_DISPATCH(subtract)(tile, subtracted, count);
    }
    const Residual here = residual.from(at);
    if (residual.kept()) add_before(tile, count, here, false);
    const Encoded encoded = all.from(at, wire);
    Ahead ahead;
    ahead.add(from.host(), dtype, at + kTile);
    if (base.data != nullptr) ahead.add(base.host(), dtype, at + kTile);
    if (residual.before.data != nullptr) {
      ahead.add(residual.before.host(), residual.dtype, at + kTile);
    }
    HWY_DYNAMIC_DISPATCH(encode_blocks)
    (read, count, wire, keys_of(noise, at), encoded, ahead);
    if (residual.kept()) leave_residual(tile, count, wire, encoded, here);
  });
  const int64_t end = wire.scale_bytes(numel) + wire.value_bytes(numel);
  std::memset(to + end, 0, static_cast<size_t>(wire.encoded_bytes(numel) - end));
}

void sum_on_host(const Sum& sum, const Wire& wire) {
  for_each_tile(sum.numel, [&](int64_t at, int64_t count) {
    alignas(64) float tile[kTile];
    Ahead result;  // the sum of this tile is written after it is made
    result.add(sum.dst.host(), sum.dst_dtype, at);
    for (size_t i = 0; i < sum.sources.size(); ++i) {
      char* const piece = static_cast<char*>(const_cast<void*>(sum.sources[i]));
      const Encoded from = Encoded::of(piece, sum.numel, wire).from(at, wire);
      HWY_DYNAMIC_DISPATCH(use_decoded)
      (tile, count, wire, from, i == 0 ? Decoded::kSet : Decoded::kAdd, i == 0 ? result : Ahead());
    }
    if (sum.scale != 1.0F) {
      for (int64_t i = 0; i < count; ++i) tile[i] *= sum.scale;
    }
    host::take(sum.dst.host() + at * dtype_bytes(sum.dst_dtype), sum.dst_dtype, tile, Dtype::kFp32,
               count, sum.accumulate);
  });
}

}  // namespace

void add_residual(const Residual& residual, float factor, Address addends, Dtype dtype,
                  int64_t numel) {
  if (residual.before.data == nullptr) return;
  residual.for_each_range(numel, [&](int64_t begin, int64_t end, bool idle) {
    PENSTOCK_ASSERT(residual.kept() || !idle, "[device::add_residual] nothing keeps the residual");
    const Residual here = residual.from(begin);
    const int64_t count = end - begin, bytes = count * dtype_bytes(residual.dtype);
    if (!idle) {
      const void* const source = here.before.data;
      sum_chunks({addends + begin * dtype_bytes(dtype),
                  dtype,
                  {&source, 1},
                  here.dtype,
                  count,
                  factor,
                  /*accumulate=*/true});
      if (here.kept()) zero(here.after, bytes);
    } else if (here.after != here.before) {
      copy(here.after, here.before, bytes);
    }
  });
}

void encode(Address to, const PlainValues& values, const Wire& wire, const Noise& noise,
            const Residual& residual) {
  PENSTOCK_ASSERT(wire.lossy(), "[device::encode] the plain wire has no encoded form");
  if (to.device != nullptr) return encode_on_device(to, values, wire, noise, residual);
  encode_on_host(to.host(), values, wire, noise, residual);
}

void decode(Address to, Dtype dtype, Address from, int64_t numel, const Wire& wire) {
  const void* const source = from.data;
  decode_sum({to, dtype, {&source, 1}, Dtype::kFp32, numel}, wire);
}

void decode_sum(const Sum& sum, const Wire& wire) {
  PENSTOCK_ASSERT(wire.lossy() && !sum.sources.empty(), "[device::decode_sum] nothing to decode");
  if (sum.dst.device != nullptr) return sum_pieces_on_device(sum, wire);
  sum_on_host(sum, wire);
}

void recode(Address to, Dtype to_dtype, Address from, Dtype from_dtype, int64_t numel,
            bool accumulate) {
  if (to_dtype == from_dtype && is_quantized(to_dtype)) {
    return copy(to, from, buffer_bytes(to_dtype, numel));
  }
  if (!is_quantized(to_dtype) && !is_quantized(from_dtype)) {
    return take(to, to_dtype, from, from_dtype, numel, accumulate);
  }
  PENSTOCK_ASSERT(!accumulate, "[device::recode] quantized values are never added");
  if (numel == 0) return;
  const Unseen unseen;
  const bool decodes = is_quantized(from_dtype);
  const Wire wire = code_of(decodes ? from_dtype : to_dtype);
  // Only encoded values cross between the host and a device.
  const Device* const where = decodes ? to.device : from.device;
  const at::Tensor bytes =
      at::empty({to.device == from.device ? 0 : wire.encoded_bytes(numel)},
                at::TensorOptions(at::kByte).device(where ? where->where() : at::kCPU));
  const Address here = address_of(bytes, where);
  if (decodes) {
    if (to.device != from.device) copy(here, from, bytes.numel());
    decode(to, to_dtype, to.device == from.device ? from : here, numel, wire);
  } else {
    encode(to.device == from.device ? to : here, {from, from_dtype, numel}, wire, {});
    if (to.device != from.device) copy(to, here, bytes.numel());
  }
}

at::Tensor decoded(Address values, Dtype from, Dtype dtype, int64_t numel, const Device* where) {
  const at::Tensor made =
      at::empty({numel}, at::TensorOptions(scalar_type(dtype))
                             .device(where == nullptr ? c10::Device(at::kCPU) : where->where()));
  recode(address_of(made, where), dtype, values, from, numel);
  return made;
}

at::Tensor coded(Address values, Dtype from, Dtype dtype, int64_t numel,
                 const std::vector<Wire>& wires) {
  const at::TensorOptions where = values.device == nullptr
                                      ? at::TensorOptions(at::kCPU)
                                      : at::TensorOptions(values.device->where());
  const at::Tensor made = at::empty({numel}, where.dtype(scalar_type(dtype)));
  const Address at = address_of(made, values.device);
  take(at, dtype, values, from, numel, false);
  for (const Wire& wire : wires) {
    const at::Tensor bytes = at::empty({wire.encoded_bytes(numel)}, where.dtype(at::kByte));
    encode(address_of(bytes, values.device), {at, dtype, numel}, wire, {});
    decode(at, dtype, address_of(bytes, values.device), numel, wire);
  }
  return made;
}

}  // namespace penstock::device
#endif
