#pragma once
// The encoded form of lossy wires ([Note: Wires], src/place/wire.h): the scales of all blocks, then
// one int8 per value, or two values of four bits per byte (the even value in the low half), or the
// signs of eight values per byte (1: negative; the first value in the lowest bit). On the host,
// SIMD (Highway) is chosen at run time and the work is split with at::parallel_for; on a device,
// torch's operations run on this thread's stream. Every instruction set, number of threads and
// device gives the same bytes.
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

// The random numbers of stochastic rounding are a function of `key` and of the value's index in its
// flat, which is `first` for the first value.
struct Noise {
  uint64_t key = 0;
  int64_t first = 0;
};

struct PlainValues {
  Address at;
  Dtype dtype = Dtype::kFp32;
  int64_t numel = 0;
  Address base{};  // of this dtype: subtracted from the values; null: zeros
};

// Error feedback: what an encoding rounds away is added to the values of the next encoding. `after`
// receives values + before - decoded values, in `dtype`. `before` may be the same memory; if it is
// null, it stands for zeros. In a block with a value that is not finite, `after` is `before`.
struct Residual {
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;

  Address before{}, after{};
  Dtype dtype = Dtype::kFp32;
  // Indices [first, second), in ascending order, of values to which nothing is added. Null: none.
  std::shared_ptr<const Ranges> idle{};
  int64_t first = 0;  // index of the first value

  bool kept() const { return after.data != nullptr; }
  Residual from(int64_t value) const {
    const auto moved = [&](Address at) {
      return at.data == nullptr ? at : at + value * dtype_bytes(dtype);
    };
    return {moved(before), moved(after), dtype, idle, first + value};
  }
  // Calls visit(begin, end, is_idle) for each range of the first `count` values, from 0.
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

// For a sum without an encoding: adds `before`, multiplied by `factor`, to the addends and leaves
// it, in `after`, only where it is idle. Without a kept `after`, no value may be idle.
void add_residual(const Residual& residual, float factor, Address addends, Dtype dtype,
                  int64_t numel);

// Writes wire.encoded_bytes(values.numel) bytes to `to`. Without a kept residual, encodes the
// values alone.
void encode(Address to, const PlainValues& values, const Wire& wire, const Noise& noise,
            const Residual& residual = {});
void decode(Address to, Dtype dtype, Address from, int64_t numel, const Wire& wire);
// sum_chunks() for encoded sources; the dtype of the sources is not used.
void decode_sum(const Sum& sum, const Wire& wire);

// Returns the values in `dtype` as they arrive after each of the wires in turn. All wires must
// round to nearest.
at::Tensor coded(Address values, Dtype from, Dtype dtype, int64_t numel,
                 const std::vector<Wire>& wires);

}  // namespace penstock::device
