#pragma once
// Parts of the wire codec that do not depend on the instruction set.
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

#include "src/device/address.h"
#include "src/device/wire_codec.h"
#include "src/place/wire.h"

namespace penstock::device {

// Points to the scales and values of one encoded piece, starting at one of its blocks.
struct Encoded {
  float* scales = nullptr;
  uint8_t* values = nullptr;

  static Encoded of(char* at, int64_t numel, const Wire& wire) {
    return {reinterpret_cast<float*>(at), reinterpret_cast<uint8_t*>(at + wire.scale_bytes(numel))};
  }
  // `at`: the index of the first value of a block.
  Encoded from(int64_t at, const Wire& wire) const {
    return {scales + at / wire.block, values + wire.value_bytes(at)};
  }
};

struct Scale {
  float step = 0.0F;     // value of the integer 1
  float inverse = 0.0F;  // value * inverse is at most the number of levels
};

inline constexpr uint32_t kInfBits = 0x7F800000U;  // the bits of infinity; larger bits are NaN
// A block whose largest magnitude is below this is encoded as zeros, so that no step is subnormal.
inline constexpr float kLeast = 0x1p-118F;

inline Scale scale_of(uint32_t largest_bits, int levels) {
  if (largest_bits >= kInfBits) return {std::numeric_limits<float>::quiet_NaN(), 0.0F};
  const auto largest = std::bit_cast<float>(largest_bits);
  if (largest < kLeast) return {};
  const auto count = static_cast<float>(levels);
  return {largest / count, count / largest};
}

// Returns the scale of a block: the mean magnitude of its `here` values. The rest of the block is
// padded with zeros. `sum`: the sum of the magnitudes, divided by `block`.
inline float mean_of(uint32_t largest_bits, float sum, int64_t block, int64_t here) {
  if (largest_bits >= kInfBits) return std::numeric_limits<float>::quiet_NaN();
  if (std::bit_cast<float>(largest_bits) < kLeast) return 0.0F;
  if (here == block) return sum;
  return sum * (static_cast<float>(block) / static_cast<float>(here));
}

// Memory that will be used after the current tile, and is prefetched now.
struct Ahead {
  struct Stream {
    const char* data = nullptr;
    int64_t size = 0;  // bytes of a value
  };
  std::array<Stream, 3> streams{};
  size_t count = 0;

  void add(const char* values, Dtype dtype, int64_t first) {
    const int64_t size = dtype_bytes(dtype);
    streams.at(count++) = {values + first * size, size};
  }
};

enum class Decoded : uint8_t { kSet, kAdd, kSubtract };  // how decoded values are written

struct Keys {
  uint32_t low = 0, high = 0;
  uint32_t first = 0;  // index of the first value
};

// Returns the keys of the values of a piece, starting at value `at`.
inline Keys keys_of(const Noise& noise, int64_t at = 0) {
  return {static_cast<uint32_t>(noise.key), static_cast<uint32_t>(noise.key >> 32),
          static_cast<uint32_t>(noise.first + at)};
}

}  // namespace penstock::device
