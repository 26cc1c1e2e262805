#pragma once
// Copies between host and device and on the device. As on CUDA, the host waits for a copy unless
// the host memory is pinned, both sides have the same dtype and layout, and the caller asks for
// non_blocking.
#include <ATen/core/Tensor.h>

namespace penstock::sim {

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to);

// Implements item().
at::Scalar read_number(const at::Tensor& tensor);

}  // namespace penstock::sim
