#pragma once
// The device memory that kernels read, write and take. Computed from an operator's arguments and
// results when it is issued.
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace penstock::sim {

// Returns the tensor's bytes, 0 for a host tensor. An element that several indices share, as in an
// expanded tensor, counts once.
size_t bytes_touched(const at::Tensor& tensor);

struct Traffic {
  size_t bytes = 0;
  size_t temporary = 0;  // bytes that CUDA's kernel takes while it runs
};

Traffic traffic_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results);

}  // namespace penstock::sim
