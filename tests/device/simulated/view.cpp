#include "tests/device/simulated/view.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "tests/device/simulated/allocator.h"
#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/counting.h"

namespace penstock::sim {
namespace {

// Not null, which means an empty tensor, and not a device pointer.
void* const kNoMemory = reinterpret_cast<void*>(16);

// Returns the bytes from the first element to the last.
size_t span_of(const at::Tensor& tensor) {
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    span += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<size_t>(span * tensor.element_size());
}

void* address_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return nullptr;
  void* pointer = tensor.mutable_data_ptr();
  if (!pointer) return kNoMemory;
  if (on_device(tensor)) check_bounds(pointer, span_of(tensor));
  return pointer;
}

}  // namespace

View::View(const at::Tensor& tensor)
    : pointer_(address_of(tensor)),
      sizes_(tensor.sizes()),
      strides_(tensor.strides()),
      dtype_(tensor.scalar_type()),
      wrapped_number_(tensor.unsafeGetTensorImpl()->is_wrapped_number()),
      conjugate_(tensor.is_conj()),
      negative_(tensor.is_neg()) {}

at::Tensor View::on_shadow() const { return at_address(shadow(pointer_)); }

at::Tensor View::on_host() const { return at_address(pointer_); }

at::Tensor View::at_address(void* address) const {
  if (!address) return at::detail::empty_strided_cpu(sizes_, strides_, dtype_);
  auto tensor = at::from_blob(address, sizes_, strides_, at::TensorOptions().dtype(dtype_));
  if (wrapped_number_) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (conjugate_) tensor._set_conj(true);
  if (negative_) tensor._set_neg(true);
  return tensor;
}

at::Tensor counted(at::Tensor tensor) {
  const size_t bytes = tensor.storage().nbytes();
  if (bytes > 0) count_temporary(bytes);
  return tensor;
}

at::Tensor new_on_device(const at::Tensor& shape, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return counted(at::detail::empty_strided_generic(
      shape.sizes(), shape.strides(), &device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.scalar_type()));
}

}  // namespace penstock::sim
