#pragma once
// The encoded form of lossy wires ([Note: Wires], src/place/wire.h). It has the scales of all
// blocks, then the values. A byte has one int8 or float8 value, or two 4-bit values (the even one
// in the low half), or the signs of eight values (1: negative; the first value in the lowest bit).
// On the host, SIMD (Highway) is chosen at run time and the work is split with at::parallel_for; on
// a device, torch's operations run on this thread's stream. Every instruction set, number of
// threads and device gives the same bytes.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "src/device/address.h"
#include "src/device/sum.h"
#include "src/place/placement.h"

namespace penstock::device {

// The random number for a value in stochastic rounding is a function of `key` and of the value's
// index in its flat. `first` is the index of the first value.
struct Noise {
  uint64_t key = 0;
  int64_t first = 0;
};

struct PlainValues {
  Address at;
  Dtype dtype = Dtype::kFp32;
  int64_t numel = 0;
  Address base{};  // subtracted from the values; of the same dtype; null: zeros
};

// Error feedback: the rounding error of an encoding is added to the values of the next encoding.
// `after` receives values + before - decoded values, in `dtype`. `before` and `after` may be the
// same memory. If `before` is null, it stands for zeros. If a block has a value that is not finite,
// `after` receives `before` for this block.
struct Residual {
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;

  Address before{}, after{};
  Dtype dtype = Dtype::kFp32;
  // Ranges [first, second) of indices, in ascending order. Nothing is added to the values in these
  // ranges. Null: no ranges.
  std::shared_ptr<const Ranges> idle{};
  int64_t first = 0;  // index of the first value

  bool kept() const { return after.data != nullptr; }
  Residual from(int64_t value) const {
    const auto moved = [&](Address at) {
      return at.data == nullptr ? at : at + value * dtype_bytes(dtype);
    };
    return {moved(before), moved(after), dtype, idle, first + value};
  }
  // Divides the first `count` values into idle and other ranges, and calls visit(begin, end,
  // is_idle) for each range. `begin` and `end` count from the first value.
  template <class Visit>
  void for_each_range(int64_t count, const Visit& visit) const {
    int64_t at = 0;
    for (const auto& [begin, end] : idle ? *idle : Ranges()) {
      const int64_t from = std::max(at, begin - first), to = std::min(count, end - first);
      if (from >= to) continue;
      if (at < from) visit(at, from, false);
      visit(from, to, true);
      at = to;
    }
    if (at < count) visit(at, count, false);
  }
};

// For a sum without an encoding. For values that are not idle, adds `before` times `factor` to the
// addends, and sets `after` to zero if it is kept. For idle values, copies `before` to `after`. If
// `after` is not kept, no value may be idle.
void add_residual(const Residual& residual, float factor, Address addends, Dtype dtype,
                  int64_t numel);

// Writes wire.encoded_bytes(values.numel) bytes to `to`. If the residual is not kept, only the
// values are encoded.
void encode(Address to, const PlainValues& values, const Wire& wire, const Noise& noise,
            const Residual& residual = {});
void decode(Address to, Dtype dtype, Address from, int64_t numel, const Wire& wire);
// Like sum_chunks(), but for encoded sources. `sum.dtype` is not used.
void decode_sum(const Sum& sum, const Wire& wire);

// Like take(), and also encodes and decodes: one of the dtypes may be quantized ([Note: Quantized
// parameters]). Then `numel` values are a whole buffer, and `accumulate` must be false.
void recode(Address to, Dtype to_dtype, Address from, Dtype from_dtype, int64_t numel,
            bool accumulate = false);
// Returns the values of a buffer in `dtype`, in the memory of `where` (null: host memory).
at::Tensor decoded(Address values, Dtype from, Dtype dtype, int64_t numel, const Device* where);

// Converts the values to `dtype`, then encodes and decodes them with each of the wires in turn.
// Returns the result. All wires must round to nearest.
at::Tensor coded(Address values, Dtype from, Dtype dtype, int64_t numel,
                 const std::vector<Wire>& wires);

}  // namespace penstock::device
