#pragma once
// What differs between torch 2.11 and 2.15, in one place.
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <memory>
#include <string>

namespace penstock::exec {

// shared_ptr up to 2.12, intrusive_ptr since 2.13.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

// The storage's data-access error flag. 2.11 cannot take the flag back, so there it stays unset.
inline void set_guard(c10::StorageImpl& storage, const std::string& message) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
#else
  (void)storage;
  (void)message;
#endif
}

inline void clear_guard(c10::StorageImpl& storage) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  storage.clear_data_ptr_access_error_msg_();
#else
  (void)storage;
#endif
}

// The Python object of a tensor; null where there is none, and in 2.11.
inline const void* python_object(const at::Tensor& tensor) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
#else
  (void)tensor;
  return nullptr;
#endif
}

}  // namespace penstock::exec
