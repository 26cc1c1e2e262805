#pragma once
// Wire: the form in which values travel between ranks. A plain value, usable from any thread.
//
// [Note: Wires] With the plain wire, values travel in the dtype of the buffer. The other wires
// encode blocks of values: each block has an fp32 scale and one small integer per value, so the
// largest value of a block is exact except for fp32 rounding. All ranks, including the sender, use
// the decoded values, so replicas stay equal. A sum adds the decoded addends in fp32 and in rank
// order. Zeros stay zeros. A block with a value that is not finite decodes to NaN. The code `sign`
// is different: it keeps one bit per value, and each value, even a zero, decodes to plus or minus
// the mean magnitude of its block. Only a block of zeros stays zero. The code `fp8` keeps values in
// float8_e4m3fn, scaled so that the largest value of a block is 448: the rounding step of a value
// depends on its own size.
//
//   nearest     the error of a value is at most half a rounding step of its block. Used for
//               parameters: every transfer encodes from the authority, so errors never add up.
//   stochastic  rounds up or down at random, so the mean of the error is zero. Used for addends:
//               nearest would lose values below half a rounding step in every training step.
//
// A delta ([Note: Deltas]) is the difference between the sender's new values and the values that
// the receivers hold. The rounding step depends on the size of the difference, not of the values.
// The rounding error becomes part of the next difference.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "src/place/mesh.h"

namespace penstock {

enum class Code : uint8_t { kPlain, kInt8, kInt4, kSign, kFp8 };
enum class Rounding : uint8_t { kNearest, kStochastic };

struct Wire {
  Code code = Code::kPlain;
  // Values per scale. Shards are multiples of 128 values, so no block extends over two shards.
  int block = 128;
  Rounding rounding = Rounding::kNearest;
  bool delta = false;  // encodes differences; only in gathers of updated parameters

  bool lossy() const { return code != Code::kPlain; }
  // Returns whether values can be rounded at random.
  bool takes_noise() const { return code == Code::kInt8 || code == Code::kInt4; }
  // Returns the largest value of a scaled block. Not for `sign`.
  int levels() const { return code == Code::kInt8 ? 127 : code == Code::kFp8 ? 448 : 7; }
  // Sizes of the encoded form of `numel` values, which begins with the scales. encoded_bytes() is a
  // multiple of 16. For lossy wires only.
  int64_t num_blocks(int64_t numel) const { return (numel + block - 1) / block; }
  int64_t scale_bytes(int64_t numel) const { return 4 * num_blocks(numel); }
  int64_t value_bytes(int64_t numel) const {
    switch (code) {
      case Code::kInt4:
        return (numel + 1) / 2;
      case Code::kSign:
        return (numel + 7) / 8;
      default:
        return numel;
    }
  }
  int64_t encoded_bytes(int64_t numel) const;

  // "plain", "int8/128", "int4/64/stochastic", "sign/128", "fp8/128", "int4/128/delta". `rounding`:
  // the rounding of a text that names none. parse() throws ConfigError.
  std::string text(Rounding rounding = Rounding::kNearest) const;
  static Wire parse(std::string_view text, Rounding rounding = Rounding::kNearest);
  bool operator==(const Wire&) const = default;
};

// The wires of one role's collectives, by axis.
struct Wires {
  std::array<Wire, kNumAxes> axes{};

  const Wire& on(Axis axis) const { return axes[static_cast<size_t>(axis)]; }
  Wire& on(Axis axis) { return axes[static_cast<size_t>(axis)]; }
  bool lossy() const;  // on any axis
  bool has(Code code) const;
  // Returns a copy of these wires in which a data axis of size one has the wire of the other data
  // axis, as normalize() does with layouts.
  Wires on(const Mesh& mesh) const;
  // "int8/128" if both data axes have this wire; else the axes that are not plain: "node:int4/128".
  std::string text(Rounding rounding) const;
  static Wires parse(std::string_view text, Rounding rounding);  // throws ConfigError
  bool operator==(const Wires&) const = default;
};

}  // namespace penstock
