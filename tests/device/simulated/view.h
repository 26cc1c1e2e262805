#pragma once
// A device tensor as a kernel sees it: address and shape. It holds no reference, as the arguments
// of a launched kernel: freeing too early is found only so.
#include <ATen/core/Tensor.h>

namespace penstock::sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

class View {
 public:
  // Throws what the tensor's storage says if its data may not be used. A tensor without memory (a
  // window that was dropped) makes the kernel fail, not the launch.
  explicit View(const at::Tensor& tensor);

  // The same elements as a CPU tensor. Only on a stream.
  at::Tensor on_shadow() const;

  // The same, where the address is one of the host.
  at::Tensor on_host() const;

  bool has_memory() const { return pointer_ != nullptr; }
  at::ScalarType dtype() const { return dtype_; }

 private:
  at::Tensor at_address(void* address) const;

  void* pointer_ = nullptr;
  at::DimVector sizes_, strides_;
  at::ScalarType dtype_;
  bool wrapped_number_, conjugate_, negative_;
};

// A new device tensor with the sizes, strides and dtype of another.
at::Tensor new_on_device(const at::Tensor& shape, c10::Device device);

}  // namespace penstock::sim
