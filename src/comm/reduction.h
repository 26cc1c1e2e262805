#pragma once
// Reduction: one of torch's reduce operations on the values of several ranks. A pure function of
// its sources, which any thread may call.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace penstock::comm {

class Reduction {
 public:
  // Throws c10::Error if `op` is unset, or if it needs a factor and has none. An average is the sum
  // divided by `ranks`.
  Reduction(const c10d::ReduceOp& op, at::ScalarType dtype, int ranks);

  // to[i] = op of sources[..][i], applied in the order of the sources. `to` may be one of the
  // sources.
  void run(void* to, std::span<const void* const> sources, int64_t count) const;

 private:
  void run_generic(void* to, std::span<const void* const> sources, int64_t count) const;

  const c10d::ReduceOp::RedOpType op_;
  const at::ScalarType dtype_;
  double scale_ = 1.0;  // factor of the sum
};

}  // namespace penstock::comm
