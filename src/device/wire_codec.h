#pragma once
// The encoded form of lossy wires ([Note: Wires], src/place/wire.h): the scales of all blocks, then
// one int8 per value, or two values of four bits per byte (the even value in the low half). On the
// host, SIMD (Highway) is chosen at run time and the work is split with at::parallel_for; on a
// device, torch's operations run on this thread's stream. Every instruction set, number of threads
// and device gives the same bytes.
#include <ATen/core/Tensor.h>

#include <cstdint>
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

// Writes wire.encoded_bytes(numel) bytes to `to`.
void encode(Address to, Address from, Dtype dtype, int64_t numel, const Wire& wire,
            const Noise& noise);
void decode(Address to, Dtype dtype, Address from, int64_t numel, const Wire& wire);
// sum_chunks() for encoded sources; the dtype of the sources is not used.
void decode_sum(const Sum& sum, const Wire& wire);

// Returns the values in `dtype` as they arrive after each of the wires in turn. All wires must
// round to nearest.
at::Tensor coded(Address values, Dtype from, Dtype dtype, int64_t numel,
                 const std::vector<Wire>& wires);

}  // namespace penstock::device
