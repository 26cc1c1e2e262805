#pragma once
// A device tensor as a kernel sees it: address and shape. Like the arguments of a launched kernel,
// it holds no reference to the tensor, so the tests can detect memory that is freed too early.
#include <ATen/core/Tensor.h>

namespace penstock::sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

class View {
 public:
  // Throws the storage's error if the tensor's data may not be used. If the tensor has no memory (a
  // window that was dropped), the kernel fails, not the launch.
  explicit View(const at::Tensor& tensor);

  // Returns the same elements as a CPU tensor. Call it on a stream only.
  at::Tensor on_shadow() const;

  // The same for an address in host memory.
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

// Counts the memory of a new device tensor, and returns the tensor.
at::Tensor counted(at::Tensor tensor);

// Returns a new device tensor with the sizes, strides and dtype of `shape`.
at::Tensor new_on_device(const at::Tensor& shape, c10::Device device);

}  // namespace penstock::sim
