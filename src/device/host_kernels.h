#pragma once
// Passes over values in host memory: conversion, sums of squares, looks for what is not finite or
// was edited. SIMD (Highway) chosen at run time, split over at::parallel_for. Stateless free
// functions; any thread.
#include <cstdint>

#include "src/place/placement.h"

namespace penstock::device::host {

// Sum of squares in double, in a fixed order that does not depend on the number of threads.
// Inf or NaN anywhere makes the result not finite.
double sum_squares(const void* values, Dtype dtype, int64_t numel);

// First index of an Inf or NaN, or -1.
int64_t first_nonfinite(const void* values, Dtype dtype, int64_t numel);

// dst = src (accumulate false) or dst + src, converted; sums in fp32, one rounding.
void take(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t numel,
          bool accumulate);

// take(), and whether every value of `src` is finite (dst is written all the same), in one pass.
[[nodiscard]] bool take_checked(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype,
                                int64_t numel, bool accumulate);

// Where `values` are not what `kept` rounds to, they were changed since, and `kept` becomes them.
// Elsewhere it keeps its lower bits.
void take_edits(void* kept, Dtype kept_dtype, const void* values, Dtype dtype, int64_t numel);
// The first such place, or -1.
[[nodiscard]] int64_t first_edit(const void* kept, Dtype kept_dtype, const void* values,
                                 Dtype dtype, int64_t numel);

}  // namespace penstock::device::host
