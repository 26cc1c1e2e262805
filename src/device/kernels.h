#pragma once
// Operations on values in any memory. For values in host memory, Penstock's own kernels run
// immediately. On a device, or between a device and the host, torch's operations run on this
// thread's stream. Copies between a device and pinned host memory are asynchronous: the data has
// arrived after Fence::wait_on_host().
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/device/address.h"
#include "src/device/sum.h"
#include "src/place/placement.h"

namespace penstock::device {

void copy(Address to, Address from, int64_t bytes);
void zero(Address at, int64_t bytes);

// Sets `to` to `from`, or to `to` + `from` if `accumulate` is set. Values are converted to
// `to_dtype`. Sums are computed in fp32 and rounded once. Blocks if values in device memory are
// added to host memory.
void take(Address to, Dtype to_dtype, Address from, Dtype from_dtype, int64_t numel,
          bool accumulate);
// Does what take() does, and returns whether every value of `from` is finite. Values are checked
// only on the host; on a device, take_checked() always returns true.
[[nodiscard]] bool take_checked(Address to, Dtype to_dtype, Address from, Dtype from_dtype,
                                int64_t numel, bool accumulate);

// Returns the values as a tensor in the memory of `where` (null: host memory). A copy to the host
// blocks. Returns a view if the values are already in that memory.
at::Tensor brought(Address values, Dtype dtype, int64_t numel, const Device* where);
Address address_of(const at::Tensor& values, const Device* where);

// Like host::take_edits(), for addresses that are all on one device or all on the host.
void take_edits(Address kept, Dtype kept_dtype, Address values, Dtype dtype, int64_t numel);
void take_edits(Address kept, Address values, Address base, Dtype dtype, int64_t numel);
void scale(Address values, int64_t numel, float factor);  // fp32

// [Note: Reductions on a device] If a reduction sums in a wider dtype, torch first makes a copy of
// the values in that dtype: 8 bytes per value for a sum in double. The only exception is that bf16
// and fp16 are summed in fp32 without a copy. So, of the reductions of a whole buffer below, only
// exact_squares_on_device() makes such a copy.

// Returns the square root of the sum of squares of values on a device, as a scalar on that device
// in fp32. Returns infinity if the squares overflow fp32. exact_squares_on_device() returns the sum
// of squares in double, and uses 8 more bytes of device memory per value.
at::Tensor norm_on_device(Address values, Dtype dtype, int64_t numel);
at::Tensor exact_squares_on_device(Address values, Dtype dtype, int64_t numel);
// Returns whether any value differs from the rounded value of `kept`, as a bool on the device.
at::Tensor edited_on_device(Address kept, Dtype kept_dtype, Address values, Dtype dtype,
                            int64_t numel);
// Returns two int64 numbers on the device that change if the bytes change. The bytes form rows of
// 512 bytes; `bytes` is a multiple of 512. A change is missed only if it keeps the sum of every row
// and of every column.
at::Tensor fingerprint(Address values, int64_t bytes);
// Returns in how many numbers two fingerprints differ, as a scalar in double.
at::Tensor differ(const at::Tensor& one, const at::Tensor& other);
// Returns the sum, a scalar in fp32. It is not finite if a value is not finite or if the sum
// overflows.
at::Tensor sum_on_device(Address values, Dtype dtype, int64_t numel);
void sum_on_device(const Sum& sum);
// Reads scalars of any dtype from one device, as doubles; the list may be empty. The host waits
// once for all scalars.
std::vector<double> read(const std::vector<at::Tensor>& scalars);

}  // namespace penstock::device
