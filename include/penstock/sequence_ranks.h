#pragma once
// SequenceRanks: ranks with parts of the same sequences (config key "mesh.sequence"). Between them
// attention exchanges tokens for heads (DeepSpeed-Ulysses, arXiv:2309.14509). Docs:
// docs/parallel.md.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// A view of a core with mesh.sequence > 1, for the thread that runs the model. All ranks of a
// sequence make the same calls in the same order; backwards exchange by themselves. No second
// derivatives (RuntimeFault).
class PENSTOCK_API SequenceRanks {
 public:
  // Throws ConfigError where sequences are not cut.
  explicit SequenceRanks(const Core& core);

  int index() const;
  int count() const;

  // This rank's part along `join_dim` of all of `cut_dim` -> all of it, of a part along `cut_dim`.
  // Throws c10::Error where that does not divide by count().
  at::Tensor all_to_all(const at::Tensor& part, int64_t cut_dim, int64_t join_dim) const;
  // Of each rank's addend [] (its tokens' losses, divided by the number of all): the loss, whose
  // gradients the engine then averages over these ranks as over others.
  at::Tensor sum_losses(const at::Tensor& addend) const;
  // Throws RuntimeFault on all of them where they were not given the same sequences.
  void compare(const std::vector<at::Tensor>& inputs, const std::string& others) const;

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
