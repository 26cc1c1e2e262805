#pragma once
// Contiguous: a tensor's values as contiguous bytes. The back end "penstock" exchanges tensors in
// this form.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

#include "src/comm/shm/backend.h"

namespace penstock::comm {

// A tensor's values in contiguous memory: its own memory, or a copy if the tensor is not
// contiguous.
class Contiguous {
 public:
  explicit Contiguous(const at::Tensor& tensor) : tensor_(tensor.detach()) {
    TORCH_CHECK(
        tensor.device().is_cpu() && tensor.layout() == at::kStrided,
        "[comm::ShmBackend] the back end \"penstock\" exchanges dense CPU tensors only, not ",
        tensor.toString(), " on ", tensor.device());
    values_ = tensor_.resolve_conj().resolve_neg().contiguous();
  }
  ByteRange range() const {
    return {static_cast<char*>(values_.data_ptr()), static_cast<int64_t>(values_.nbytes())};
  }
  int64_t value_bytes() const { return static_cast<int64_t>(values_.element_size()); }
  const at::Tensor& values() const { return values_; }
  // If values() is a copy of the tensor, copies the received values back into the tensor.
  void put_back() const {
    if (!values_.is_same(tensor_)) tensor_.copy_(values_);
  }

 private:
  at::Tensor tensor_, values_;
};

inline const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, "[comm::ShmBackend] ", what, " takes one tensor, not ",
              tensors.size());
  return tensors.front();
}

}  // namespace penstock::comm
