#pragma once
// The local half of a reduce-scatter: adds what the ranks sent, in fp32 and in rank order.
#include <cstdint>
#include <span>

#include "src/place/placement.h"

namespace penstock::comm {

// dst = [dst +] scale * (sources[0] + sources[1] + ...), of numel values each. dst may be one of
// the sources when the dtypes agree.
struct Sum {
  void* dst = nullptr;
  Dtype dst_dtype = Dtype::kFp32;
  std::span<const void* const> sources;
  Dtype dtype = Dtype::kFp32;
  int64_t numel = 0;
  float scale = 1.0F;
  bool accumulate = false;
};

// Sums in fp32 in the order given, rounds once to `dst_dtype`. Split over at::parallel_for; SIMD
// (Highway) chosen at run time. Allocates nothing.
void sum_chunks(const Sum& sum);

// Also returns the sum of squares of what it wrote, in the same pass: the bits of
// optim::sum_squares(dst), so not finite exactly when a value is not ([Note: Squares]).
double sum_chunks_and_squares(const Sum& sum);

}  // namespace penstock::comm
