#pragma once
// What is done to values wherever they are: on the host by its own kernels, at once; on a device,
// or between it and the host, by torch's operations on this thread's stream. Between the host and a
// device copies are asynchronous where the host's memory is pinned: Fence::wait_on_host() says when
// they are there.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/device/address.h"
#include "src/device/sum.h"
#include "src/place/placement.h"

namespace penstock::device {

void copy(Address to, Address from, int64_t bytes);
void zero(Address at, int64_t bytes);

// to = from, or to + from, converted; sums in fp32, one rounding. What is added to in host memory
// from a device is waited for.
void take(Address to, Dtype to_dtype, Address from, Dtype from_dtype, int64_t numel,
          bool accumulate);
// take(), and on the host whether every value of `from` is finite; on a device that is not known
// yet, and the answer is yes.
[[nodiscard]] bool take_checked(Address to, Dtype to_dtype, Address from, Dtype from_dtype,
                                int64_t numel, bool accumulate);

// The values in `where`'s memory (null: the host's), from wherever they are; the host waits for
// those that come to it. A view of them where they are there already.
at::Tensor brought(Address values, Dtype dtype, int64_t numel, const Device* where);
Address address_of(const at::Tensor& values, const Device* where);

// host::take_edits(), of two addresses in one memory.
void take_edits(Address kept, Dtype kept_dtype, Address values, Dtype dtype, int64_t numel);
void scale(Address values, int64_t numel, float factor);  // fp32

// On a device: the sum of squares, and how many values are not what `kept` rounds to; scalars
// there, in double.
at::Tensor squares_on_device(Address values, Dtype dtype, int64_t numel);
at::Tensor edits_on_device(Address kept, Dtype kept_dtype, Address values, Dtype dtype,
                           int64_t numel);
// Two numbers, int64 there, that differ where the bytes do, but for edits that keep the sum of
// every column and every row of 512 bytes. `bytes`: a multiple of 512.
at::Tensor fingerprint(Address values, int64_t bytes);
// How many of the numbers differ, a scalar in double.
at::Tensor differ(const at::Tensor& one, const at::Tensor& other);
// Not finite where a value is not (or the sum of all in fp32).
at::Tensor sum_on_device(Address values, Dtype dtype, int64_t numel);
void sum_on_device(const Sum& sum);
// Scalars in double on one device, or none: the host waits once for all.
std::vector<double> read(const std::vector<at::Tensor>& scalars);

}  // namespace penstock::device
