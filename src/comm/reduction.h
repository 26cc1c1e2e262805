#pragma once
// Reduction: one of torch's operations on values from several ranks, part by part. A pure function
// of its sources; any thread.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace penstock::comm {

class Reduction {
 public:
  // Throws c10::Error for an operation that there is not for that dtype. `ranks`: of an average.
  Reduction(const c10d::ReduceOp& op, at::ScalarType dtype, int ranks);

  // to[i] = op of sources[..][i], in their order. `to` may be one of the sources.
  void run(void* to, std::span<const void* const> sources, int64_t count) const;

 private:
  void run_generic(void* to, std::span<const void* const> sources, int64_t count) const;

  const c10d::ReduceOp::RedOpType op_;
  const at::ScalarType dtype_;
  double scale_ = 1.0;  // of a sum
};

}  // namespace penstock::comm
