#pragma once
// Tensors that users hold and whose memory belongs to the engine: parameters, and the shards that a
// user's optimizer steps on. When the engine ends they get memory of their own, or none ([Note:
// Windows]).
#include <ATen/core/Tensor.h>

#include <vector>

namespace penstock::engine {

// Gives the parameter's storage, which its views share, its own memory with these values (any
// dtype, same number of elements).
void own_values(const at::Tensor& param, const at::Tensor& values);

// Frees the tensors and clears the list. Reading one of them raises an error afterwards.
void take_back(std::vector<at::Tensor>& lent);

}  // namespace penstock::engine
