#pragma once
// Tensors that users hold but whose memory belongs to the engine: parameters, and the shards that a
// user's optimizer updates. When the engine ends, they get their own memory, or no memory ([Note:
// Windows]).
#include <ATen/core/Tensor.h>

#include <vector>

namespace penstock::engine {

// Gives the parameter's storage, which the parameter's views share, its own memory with `values`
// (any dtype, same number of elements).
void own_values(const at::Tensor& param, const at::Tensor& values);

// Frees the tensors and clears the list. Reading one of the tensors afterwards raises an error.
void take_back(std::vector<at::Tensor>& lent);

}  // namespace penstock::engine
