#pragma once
// Passes over values in host memory: conversion, sums of squares, and searches for values that are
// not finite or were edited. The SIMD instruction set is chosen at run time (Highway); work is
// split with at::parallel_for. The functions have no state; any thread may call them.
#include <cstdint>

#include "src/place/placement.h"

namespace penstock::device::host {

// Returns the sum of squares in double, added in a fixed order that does not depend on the number
// of threads. An Inf or NaN anywhere makes the result not finite.
double sum_squares(const void* values, Dtype dtype, int64_t numel);

// Returns the first index of an Inf or NaN, or -1.
int64_t first_nonfinite(const void* values, Dtype dtype, int64_t numel);

// Sets dst to src, or to dst + src if `accumulate` is set. Values are converted to dst's dtype.
// Sums are computed in fp32 and rounded once.
void take(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t numel,
          bool accumulate);

// Does what take() does, and in the same pass checks the values. Returns whether every value of
// `src` is finite. Writes `dst` in either case.
[[nodiscard]] bool take_checked(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype,
                                int64_t numel, bool accumulate);

// Copies edited values to `kept`. A value was edited if it differs from the rounded value of
// `kept`. All other elements of `kept` do not change, so they keep the bits that rounding drops.
void take_edits(void* kept, Dtype kept_dtype, const void* values, Dtype dtype, int64_t numel);
// The same for values that were published as `base` (of the same dtype) and are not the rounded
// values of `kept`. A value was edited if its bits differ from the base. `kept` then gets the value
// plus the update that was not published yet (rounded `kept` - base). So no update is lost, even if
// all values are edited in each step.
void take_edits(float* kept, const void* values, const void* base, Dtype dtype, int64_t numel);
// Returns the index of the first edited value, or -1.
[[nodiscard]] int64_t first_edit(const void* kept, Dtype kept_dtype, const void* values,
                                 Dtype dtype, int64_t numel);

}  // namespace penstock::device::host
