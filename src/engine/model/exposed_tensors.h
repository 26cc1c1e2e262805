#pragma once
// Tensors in the user's hands whose memory is the engine's: parameters, and what an optimizer of
// the user's steps on. At the end they get memory of their own, or none ([Note: Windows]).
#include <ATen/core/Tensor.h>

#include <vector>

namespace penstock::engine {

// The parameter's storage, which its views share, gets memory of its own with these values (any
// dtype, as many elements).
void own_values(const at::Tensor& param, const at::Tensor& values);

// Reading one of them raises from here on; the list is empty then.
void take_back(std::vector<at::Tensor>& lent);

}  // namespace penstock::engine
