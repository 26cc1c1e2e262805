#pragma once
// The local half of a reduce-scatter: adds what the ranks sent, in fp32 and in rank order.
#include <cstdint>
#include <span>

#include "src/device/address.h"
#include "src/place/placement.h"

namespace penstock::device {

// dst = [dst +] scale * (sources[0] + sources[1] + ...), of numel values each, in the memory that
// dst is in. dst may be one of the sources when the dtypes agree.
struct Sum {
  Address dst;
  Dtype dst_dtype = Dtype::kFp32;
  std::span<const void* const> sources;
  Dtype dtype = Dtype::kFp32;
  int64_t numel = 0;
  float scale = 1.0F;
  bool accumulate = false;
};

// Sums in fp32 in the order given, rounds once to `dst_dtype`. On the host split over
// at::parallel_for, with SIMD (Highway) chosen at run time, and allocates nothing; on a device
// queued on this thread's stream.
void sum_chunks(const Sum& sum);

// On the host. Also returns the sum of squares of what it wrote, in the same pass: the bits of
// host::sum_squares(dst), so not finite exactly when a value is not ([Note: Squares]). Counted on
// from `before`: parts one after the other, of multiples of 16 * 1024 values but for the last, have
// the bits of the whole.
double sum_chunks_and_squares(const Sum& sum, double before = 0.0);

}  // namespace penstock::device
