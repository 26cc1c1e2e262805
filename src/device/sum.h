#pragma once
// The local half of a reduce-scatter: adds the values that the ranks sent, in fp32 and in rank
// order.
#include <cstdint>
#include <span>

#include "src/device/address.h"
#include "src/place/placement.h"

namespace penstock::device {

// dst = [dst +] scale * (sources[0] + sources[1] + ...). dst and each source have numel values. The
// sources are in the same memory as dst. dst may be one of the sources if the dtypes are equal.
struct Sum {
  Address dst;
  Dtype dst_dtype = Dtype::kFp32;
  std::span<const void* const> sources;
  Dtype dtype = Dtype::kFp32;
  int64_t numel = 0;
  float scale = 1.0F;
  bool accumulate = false;
};

// Sums in fp32 in the given order and rounds once to `dst_dtype`. On the host the work is split
// with at::parallel_for, SIMD (Highway) is chosen at run time, and nothing is allocated. On a
// device the work is queued on this thread's stream.
void sum_chunks(const Sum& sum);

// Host only. Does what sum_chunks() does, and in the same pass computes the sum of squares of the
// written values. Returns this sum of squares, which starts at `before`. If `before` is 0, the
// result has the same bits as host::sum_squares(dst). It is finite if and only if all values are
// finite ([Note: Squares]). A range may be summed in consecutive parts: if each part except the
// last is a multiple of 16 * 1024 values, the bits are those of one call for the whole range.
double sum_chunks_and_squares(const Sum& sum, double before = 0.0);

}  // namespace penstock::device
