// The encoded bytes beside a reference in plain loops, on each instruction set and by torch's
// operations; rounding, zeros, values that are not finite, and sums.
#include "src/device/wire_codec.h"

#include <c10/util/Float8_e4m3fn.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "src/device/device.h"
#include "src/device/host_kernels.h"
#include "src/device/on_target.h"

namespace penstock::device {
namespace {

using Bytes = std::vector<char>;

std::vector<Wire> every_wire() {
  std::vector<Wire> wires;
  for (const Code code : {Code::kInt8, Code::kInt4})
    for (const int block : {32, 64, 128})
      for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic})
        wires.push_back({code, block, rounding});
  return wires;
}

std::vector<Wire> sign_wires() {
  return {{Code::kSign, 32, Rounding::kNearest},
          {Code::kSign, 64, Rounding::kNearest},
          {Code::kSign, 128, Rounding::kNearest}};
}

std::vector<Wire> fp8_wires() {
  return {{Code::kFp8, 32, Rounding::kNearest},
          {Code::kFp8, 64, Rounding::kNearest},
          {Code::kFp8, 128, Rounding::kNearest}};
}

std::vector<Wire> wires_of_all_codes() {
  std::vector<Wire> wires = every_wire();
  for (const Wire& wire : sign_wires()) wires.push_back(wire);
  for (const Wire& wire : fp8_wires()) wires.push_back(wire);
  return wires;
}

// Values whose magnitudes differ by block, with zeros.
std::vector<float> values_of(int64_t numel, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(static_cast<size_t>(numel));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto row = static_cast<float>(i / 32 % 7);
    values[i] = i % 11 == 0 ? 0.0F : draw(engine) * std::exp(row - 3.0F);
  }
  return values;
}

Bytes in_dtype(const std::vector<float>& values, Dtype dtype) {
  Bytes bytes(values.size() * static_cast<size_t>(dtype_bytes(dtype)));
  host::take(bytes.data(), dtype, values.data(), Dtype::kFp32, static_cast<int64_t>(values.size()),
             false);
  return bytes;
}

std::vector<float> in_fp32(const Bytes& bytes, Dtype dtype) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(dtype_bytes(dtype)));
  host::take(values.data(), Dtype::kFp32, bytes.data(), dtype, static_cast<int64_t>(values.size()),
             false);
  return values;
}

float noise_of(uint32_t index, uint64_t key) {
  uint32_t x =
      (index ^ static_cast<uint32_t>(key)) * 0x9E3779B9U + static_cast<uint32_t>(key >> 32);
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  return static_cast<float>((x ^ (x >> 16)) >> 16) * 0x1p-16F;
}

Bytes reference(const std::vector<float>& values, const Wire& wire, const Noise& noise) {
  const auto numel = static_cast<int64_t>(values.size());
  Bytes bytes(static_cast<size_t>(wire.encoded_bytes(numel)));
  char* const codes = bytes.data() + wire.scale_bytes(numel);
  for (int64_t at = 0; at < numel; at += wire.block) {
    const int64_t end = std::min<int64_t>(at + wire.block, numel);
    float largest = 0.0F;
    for (int64_t i = at; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
    const auto levels = static_cast<float>(wire.levels());
    const float step = largest / levels, inverse = largest > 0 ? levels / largest : 0.0F;
    std::memcpy(bytes.data() + at / wire.block * 4, &step, 4);
    for (int64_t i = at; i < end; ++i) {
      const float scaled = values[i] * inverse;
      const auto index = static_cast<uint32_t>(noise.first + i);
      const float whole = wire.rounding == Rounding::kNearest
                              ? std::nearbyint(scaled)
                              : std::floor(scaled + noise_of(index, noise.key));
      const int q = static_cast<int>(std::clamp(whole, -levels, levels));
      if (wire.code == Code::kInt8) {
        codes[i] = static_cast<char>(q);
      } else {
        codes[i / 2] = static_cast<char>(codes[i / 2] | (q & 15) << (i % 2 * 4));
      }
    }
  }
  return bytes;
}

// Sums sixteen partial sums, each of every sixteenth value.
Bytes reference_signs(const std::vector<float>& values, const Wire& wire) {
  const auto numel = static_cast<int64_t>(values.size());
  Bytes bytes(static_cast<size_t>(wire.encoded_bytes(numel)));
  char* const codes = bytes.data() + wire.scale_bytes(numel);
  for (int64_t at = 0; at < numel; at += wire.block) {
    const int64_t end = std::min<int64_t>(at + wire.block, numel);
    float sums[16] = {};
    for (int64_t i = at; i < end; ++i) {
      sums[(i - at) % 16] += std::abs(values[i]) / static_cast<float>(wire.block);
    }
    for (int half = 8; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    const float filled = static_cast<float>(wire.block) / static_cast<float>(end - at);
    const float scale = sums[0] * filled;
    std::memcpy(bytes.data() + at / wire.block * 4, &scale, 4);
    for (int64_t i = at; i < end && scale > 0; ++i) {
      if (std::signbit(values[i])) codes[i / 8] = static_cast<char>(codes[i / 8] | 1 << i % 8);
    }
  }
  return bytes;
}

Bytes encoded(const Bytes& from, Dtype dtype, const Wire& wire, const Noise& noise,
              const Device* device = nullptr) {
  const auto numel = static_cast<int64_t>(from.size()) / dtype_bytes(dtype);
  Bytes bytes(static_cast<size_t>(wire.encoded_bytes(numel)), 'x');
  encode({bytes.data(), device}, {{const_cast<char*>(from.data()), device}, dtype, numel}, wire,
         noise);
  return bytes;
}

std::vector<float> decoded(Bytes bytes, int64_t numel, const Wire& wire) {
  std::vector<float> values(static_cast<size_t>(numel));
  decode(values.data(), Dtype::kFp32, bytes.data(), numel, wire);
  return values;
}

// A CPU seen as a device: torch's operations instead of the kernels.
const Device& by_torch() {
  static const Device device(at::kCPU);
  return device;
}

class WireCodecTest : public samples::OnTarget<testing::TestWithParam<int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Targets, WireCodecTest,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()));

TEST_P(WireCodecTest, WritesTheBytesOfTheReference) {
  const Noise noise{0x123456789ABCDEF0ULL, 77};
  for (const int64_t numel : {1, 2, 31, 32, 33, 127, 128, 129, 2047, 2048, 2049, 70'001}) {
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
      const Bytes values = in_dtype(values_of(numel, 5), dtype);
      for (const Wire& wire : every_wire()) {
        const Bytes expected = reference(in_fp32(values, dtype), wire, noise);
        ASSERT_EQ(encoded(values, dtype, wire, noise), expected) << wire.text() << " " << numel;
        ASSERT_EQ(encoded(values, dtype, wire, noise, &by_torch()), expected)
            << wire.text() << " " << numel << " by torch";
      }
    }
  }
}

TEST_P(WireCodecTest, WritesTheSignsOfTheReference) {
  for (const int64_t numel : {1, 2, 7, 31, 32, 33, 127, 128, 129, 2047, 2048, 2049, 70'001}) {
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
      const Bytes values = in_dtype(values_of(numel, 5), dtype);
      for (const Wire& wire : sign_wires()) {
        const Bytes expected = reference_signs(in_fp32(values, dtype), wire);
        ASSERT_EQ(encoded(values, dtype, wire, {}), expected) << wire.text() << " " << numel;
        ASSERT_EQ(encoded(values, dtype, wire, {}, &by_torch()), expected)
            << wire.text() << " " << numel << " by torch";
        const std::vector<float> seen = decoded(expected, numel, wire);
        for (int64_t i = 0; i < numel; ++i) {
          float scale = 0.0F;
          std::memcpy(&scale, expected.data() + i / wire.block * 4, 4);
          ASSERT_EQ(seen[i], std::signbit(in_fp32(values, dtype)[i]) ? -scale : scale);
          if (numel > 3'000) break;  // quadratic
        }
      }
    }
  }
}

// torch's conversions to and from float8 are the reference.
TEST_P(WireCodecTest, WritesTheFloat8OfTheReference) {
  for (const int64_t numel : {1, 2, 31, 33, 127, 128, 129, 2047, 2049, 70'001}) {
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
      const Bytes bytes = in_dtype(values_of(numel, 6), dtype);
      const std::vector<float> values = in_fp32(bytes, dtype);
      for (const Wire& wire : fp8_wires()) {
        const Bytes seen = encoded(bytes, dtype, wire, {});
        ASSERT_EQ(encoded(bytes, dtype, wire, {}, &by_torch()), seen) << wire.text() << " by torch";
        const std::vector<float> arrived = decoded(seen, numel, wire);
        for (int64_t at = 0; at < numel; at += wire.block) {
          const int64_t end = std::min<int64_t>(at + wire.block, numel);
          float largest = 0.0F, step = 0.0F;
          for (int64_t i = at; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
          std::memcpy(&step, seen.data() + at / wire.block * 4, 4);
          ASSERT_EQ(step, largest / 448.0F);
          for (int64_t i = at; i < end; ++i) {
            const float inverse = largest > 0 ? 448.0F / largest : 0.0F;
            const c10::Float8_e4m3fn code(std::min(448.0F, std::max(-448.0F, values[i] * inverse)));
            ASSERT_EQ(static_cast<uint8_t>(seen[wire.scale_bytes(numel) + i]), code.x) << values[i];
            ASSERT_EQ(arrived[i], static_cast<float>(code) * step) << wire.text() << " " << i;
            // Half a step is a sixteenth of the value, or of the smallest normal number.
            const float most = std::max(std::abs(values[i]), 0x1p-6F * step) / 16.0F;
            ASSERT_LE(std::abs(arrived[i] - values[i]), most * 1.0001F);
          }
        }
      }
    }
  }
}

TEST_P(WireCodecTest, AnErrorIsAtMostAStep) {
  const std::vector<float> values = values_of(4'001, 9);
  for (const Wire& wire : every_wire()) {
    const std::vector<float> seen =
        decoded(encoded(in_dtype(values, Dtype::kFp32), Dtype::kFp32, wire, {3, 0}), 4'001, wire);
    for (size_t at = 0; at < values.size(); at += wire.block) {
      const size_t end = std::min(at + wire.block, values.size());
      float largest = 0.0F;
      for (size_t i = at; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
      const float step = largest / static_cast<float>(wire.levels());
      const float most = (wire.rounding == Rounding::kNearest ? 0.5F : 1.0F) * step * 1.0001F;
      for (size_t i = at; i < end; ++i) {
        ASSERT_LE(std::abs(seen[i] - values[i]), most) << wire.text();
        if (values[i] == 0.0F) {
          ASSERT_EQ(seen[i], 0.0F) << wire.text();
        }
      }
    }
  }
}

TEST_P(WireCodecTest, SumsInOrderAndAddsAndScales) {
  for (const int64_t numel : {1, 100, 128, 5'000, 40'000}) {
    for (const Wire& wire : wires_of_all_codes()) {
      std::vector<Bytes> pieces;
      std::vector<const void*> sources;
      std::vector<float> expected(static_cast<size_t>(numel));
      for (unsigned rank = 0; rank < 3; ++rank) {
        pieces.push_back(
            encoded(in_dtype(values_of(numel, rank), Dtype::kFp32), Dtype::kFp32, wire, {rank, 0}));
        const std::vector<float> part = decoded(pieces.back(), numel, wire);
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += part[i];
      }
      for (const Bytes& piece : pieces) sources.push_back(piece.data());
      for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
        const Bytes before = in_dtype(values_of(numel, 8), dtype);
        const std::vector<float> old = in_fp32(before, dtype);
        std::vector<float> wanted = expected;
        for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = wanted[i] * 0.25F + old[i];
        for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
          Bytes sum = before;
          decode_sum({{sum.data(), device}, dtype, sources, Dtype::kFp32, numel, 0.25F, true},
                     wire);
          ASSERT_EQ(sum, in_dtype(wanted, dtype)) << wire.text() << " " << numel;
        }
      }
    }
  }
}

TEST_P(WireCodecTest, ValuesThatAreNotFiniteMakeTheirBlockNan) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const Wire& wire : wires_of_all_codes()) {
      std::vector<float> values = values_of(512, 1);
      values[200] = bad;
      for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
        const std::vector<float> seen = decoded(
            encoded(in_dtype(values, Dtype::kFp32), Dtype::kFp32, wire, {}, device), 512, wire);
        for (size_t i = 0; i < seen.size(); ++i) {
          const bool in_block = i / wire.block == 200 / static_cast<size_t>(wire.block);
          ASSERT_EQ(std::isnan(seen[i]), in_block) << wire.text() << " " << i;
        }
      }
    }
  }
}

TEST_P(WireCodecTest, ABlockOfZerosOrOfTinyValuesIsZero) {
  for (const Wire& wire : wires_of_all_codes()) {
    for (const float tiny : {0.0F, -0.0F, 1e-40F, -1e-36F}) {
      const std::vector<float> values(300, tiny);
      for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
        const std::vector<float> seen = decoded(
            encoded(in_dtype(values, Dtype::kFp32), Dtype::kFp32, wire, {}, device), 300, wire);
        for (const float one : seen) ASSERT_EQ(one, 0.0F) << wire.text();
      }
    }
  }
}

// With 20,000 draws the mean has a standard deviation of at most 0.5 step / sqrt(20,000).
TEST_P(WireCodecTest, StochasticRoundingHasNoBias) {
  const std::vector<float> values = values_of(128, 2);
  const Bytes bytes = in_dtype(values, Dtype::kFp32);
  constexpr int kDraws = 20'000;
  for (const Wire& wire : every_wire()) {
    if (wire.rounding == Rounding::kNearest) continue;
    std::vector<double> mean(values.size());
    for (int draw = 0; draw < kDraws; ++draw) {
      const Noise noise{static_cast<uint64_t>(draw) * 0x9E3779B97F4A7C15ULL, 0};
      const std::vector<float> seen = decoded(encoded(bytes, Dtype::kFp32, wire, noise), 128, wire);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += seen[i];
    }
    for (size_t i = 0; i < mean.size(); ++i) {
      const size_t begin = i / wire.block * wire.block;
      float largest = 0.0F;
      for (size_t k = begin; k < begin + wire.block; ++k) {
        largest = std::max(largest, std::abs(values[k]));
      }
      const double step = largest / wire.levels();
      ASSERT_NEAR(mean[i] / kDraws, values[i], 5.0 * 0.5 * step / std::sqrt(kDraws)) << wire.text();
    }
  }
}

// The residual of values in two idle ranges, one of which ends inside a block.
TEST_P(WireCodecTest, WhatIsRoundedAwayIsInTheResidual) {
  const auto idle = std::make_shared<Residual::Ranges>(Residual::Ranges{{0, 130}, {2'000, 2'100}});
  for (const int64_t numel : {1, 129, 2'049, 4'000}) {
    const std::vector<float> values = values_of(numel, 3), fed = values_of(numel, 4);
    for (const Wire& wire : wires_of_all_codes()) {
      for (const auto& [ranges, has] : {std::pair(idle, true), {nullptr, true}, {nullptr, false}}) {
        std::vector<float> sum = values;
        const auto is_idle = [&](size_t i) {
          return ranges && (i < 130 || (i >= 2'000 && i < 2'100));
        };
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += has && !is_idle(i) ? fed[i] : 0.0F;
        const Bytes wanted = encoded(in_dtype(sum, Dtype::kFp32), Dtype::kFp32, wire, {5, 9});
        const std::vector<float> seen = decoded(wanted, numel, wire);
        for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
          Bytes before = in_dtype(fed, Dtype::kFp32), piece(wanted.size());
          std::vector<float> left(sum.size());
          Bytes of = in_dtype(values, Dtype::kFp32);
          Residual residual{.after = {left.data(), device}, .idle = ranges};
          if (has) residual.before = {before.data(), device};
          encode({piece.data(), device}, {{of.data(), device}, Dtype::kFp32, numel}, wire, {5, 9},
                 residual);
          ASSERT_EQ(piece, wanted) << wire.text() << " " << numel;
          for (size_t i = 0; i < sum.size(); ++i) {
            const float all = is_idle(i) ? values[i] + fed[i] : sum[i];
            ASSERT_EQ(left[i], all - seen[i]) << wire.text() << " " << i;
          }
        }
      }
    }
  }
}

TEST_P(WireCodecTest, ABlockThatIsNotFiniteKeepsItsResidual) {
  for (const Wire& wire : wires_of_all_codes()) {
    std::vector<float> values = values_of(512, 1);
    const std::vector<float> fed = values_of(512, 2);
    values[200] = std::numeric_limits<float>::infinity();
    for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
      Bytes of = in_dtype(values, Dtype::kFp32);
      Bytes piece(static_cast<size_t>(wire.encoded_bytes(512)));
      Bytes residual = in_dtype(fed, Dtype::kBf16);  // in place
      const Address at{residual.data(), device};
      encode({piece.data(), device}, {{of.data(), device}, Dtype::kFp32, 512}, wire, {},
             {at, at, Dtype::kBf16});
      const std::vector<float> left = in_fp32(residual, Dtype::kBf16);
      const std::vector<float> before = in_fp32(in_dtype(fed, Dtype::kBf16), Dtype::kBf16);
      for (size_t i = 0; i < left.size(); ++i) {
        const bool in_block = i / wire.block == 200 / static_cast<size_t>(wire.block);
        ASSERT_TRUE(std::isfinite(left[i])) << wire.text() << " " << i;
        if (in_block) {
          ASSERT_EQ(left[i], before[i]) << wire.text() << " " << i;
        }
      }
    }
  }
}

TEST_P(WireCodecTest, ASumWithoutEncodingTakesTheResidual) {
  const auto idle = std::make_shared<Residual::Ranges>(Residual::Ranges{{3, 7}});
  for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
    std::vector<float> addends(10, 1.0F), before(10, 0.5F), after(10, 9.0F);
    const Address to{addends.data(), device}, from{before.data(), device};
    add_residual({from, {after.data(), device}, Dtype::kFp32, idle, 0}, 1.0F, to, Dtype::kFp32, 10);
    for (size_t i = 0; i < 10; ++i) {
      const bool waits = i >= 3 && i < 7;
      ASSERT_EQ(addends[i], waits ? 1.0F : 1.5F);
      ASSERT_EQ(after[i], waits ? 0.5F : 0.0F);
    }
    add_residual({from, {}, Dtype::kFp32}, 3.0F, to, Dtype::kFp32, 10);
    ASSERT_EQ(addends[4], 2.5F);
    ASSERT_EQ(addends[9], 3.0F);
  }
}

TEST_P(WireCodecTest, CodedValuesAreThoseThatArrive) {
  const Wire int4{Code::kInt4, 64, Rounding::kNearest};
  const Wire wire{Code::kInt8, 128, Rounding::kNearest};
  const Bytes values = in_dtype(values_of(1'000, 4), Dtype::kFp32);
  for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
    const at::Tensor seen = coded({const_cast<char*>(values.data()), device}, Dtype::kFp32,
                                  Dtype::kBf16, 1'000, {wire, int4});
    Bytes expected = in_dtype(in_fp32(values, Dtype::kFp32), Dtype::kBf16);
    for (const Wire& one : {wire, int4}) {
      const Bytes piece = encoded(expected, Dtype::kBf16, one, {});
      decode(expected.data(), Dtype::kBf16, const_cast<char*>(piece.data()), 1'000, one);
    }
    ASSERT_EQ(std::memcmp(seen.const_data_ptr(), expected.data(), expected.size()), 0);
  }
}

// Decoded to fp32, values encode to the same bytes again.
TEST_P(WireCodecTest, QuantizedBuffersAreEncodedAndDecoded) {
  for (const Dtype dtype : {Dtype::kInt8, Dtype::kInt4}) {
    for (const int64_t numel : {128, 5'000, 100'000}) {
      const std::vector<float> given = values_of(numel, 7);
      const Bytes bytes = in_dtype(given, Dtype::kBf16);
      const Wire wire = code_of(dtype);
      const Bytes wanted = encoded(bytes, Dtype::kBf16, wire, {});
      const std::vector<float> values = decoded(wanted, numel, wire);
      for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
        Bytes rests(static_cast<size_t>(buffer_bytes(dtype, numel))), given_there = bytes;
        recode({rests.data(), device}, dtype, {given_there.data()}, Dtype::kBf16, numel);
        ASSERT_TRUE(std::equal(wanted.begin(), wanted.end(), rests.begin())) << numel;
        const at::Tensor seen =
            device::decoded({rests.data(), device}, dtype, Dtype::kFp32, numel, nullptr);
        ASSERT_EQ(std::memcmp(seen.const_data_ptr(), values.data(), values.size() * 4), 0);
        Bytes again(rests.size()), moved(rests.size());
        recode({again.data()}, dtype, {seen.data_ptr()}, Dtype::kFp32, numel);
        ASSERT_TRUE(std::equal(wanted.begin(), wanted.end(), again.begin())) << numel;
        recode({moved.data()}, dtype, {rests.data(), device}, dtype, numel);
        ASSERT_EQ(moved, rests);
      }
    }
  }
}

TEST_P(WireCodecTest, DeltasAreEncodedFromABaseAndAddedToIt) {
  for (const Wire& wire : {Wire{Code::kInt4, 64, Rounding::kNearest, true},
                           Wire{Code::kInt8, 128, Rounding::kNearest, true}}) {
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
      for (const int64_t numel : {1, 127, 4'097, 70'001}) {
        const Bytes values = in_dtype(values_of(numel, 4), dtype);
        const Bytes base = in_dtype(values_of(numel, 9), dtype);
        const std::vector<float> ends = in_fp32(values, dtype), begins = in_fp32(base, dtype);
        std::vector<float> deltas(ends.size()), sums(ends.size());
        for (size_t i = 0; i < ends.size(); ++i) deltas[i] = ends[i] - begins[i];
        const Bytes expected = encoded(in_dtype(deltas, Dtype::kFp32), Dtype::kFp32, wire, {});
        const std::vector<float> arrives = decoded(expected, numel, wire);
        for (size_t i = 0; i < ends.size(); ++i) sums[i] = begins[i] + arrives[i];
        for (const Device* device : {static_cast<const Device*>(nullptr), &by_torch()}) {
          Bytes piece(expected.size(), 'x');
          const auto address = [device](const Bytes& bytes) {
            return Address{const_cast<char*>(bytes.data()), device};
          };
          encode(address(piece), {address(values), dtype, numel, address(base)}, wire, {});
          ASSERT_EQ(piece, expected) << wire.text() << " " << numel;
          const Bytes result = base;
          const void* const source = piece.data();
          decode_sum({.dst = address(result),
                      .dst_dtype = dtype,
                      .sources = {&source, 1},
                      .numel = numel,
                      .accumulate = true},
                     wire);
          ASSERT_EQ(result, in_dtype(sums, dtype)) << wire.text() << " " << numel;
        }
      }
    }
  }
}

}  // namespace
}  // namespace penstock::device
