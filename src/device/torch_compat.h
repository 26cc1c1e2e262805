#pragma once
// Code that depends on the version of torch, from 2.11 to 2.15.
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>

namespace penstock::device {

// A shared_ptr up to torch 2.12, an intrusive_ptr since 2.13.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

template <class>
struct WeakOf;
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using Type = std::weak_ptr<T>;
};
template <class T, class Null>
struct WeakOf<c10::intrusive_ptr<T, Null>> {
  using Type = c10::weak_intrusive_ptr<T, Null>;
};
using WeakNodePtr = WeakOf<NodePtr>::Type;  // has expired()

// Sets the storage's data-access error flag, so every read of its data throws `message`.
inline void set_guard(c10::StorageImpl& storage, const std::string& message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void clear_guard(c10::StorageImpl& storage);

// Like tensor.set_data(data), but also works if the tensors are on different devices, for which
// torch may refuse the call.
void set_data(const at::Tensor& tensor, const at::Tensor& data);

// Returns the Python object of a tensor, or null.
inline const void* python_object(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
}

}  // namespace penstock::device
