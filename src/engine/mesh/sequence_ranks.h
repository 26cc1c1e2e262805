#pragma once
// SequenceRanks: ranks that each have a part of the same sequences (config key "mesh.sequence").
// For attention, the ranks of a group trade their cut of the tokens for a cut of the heads
// (DeepSpeed-Ulysses, arXiv:2309.14509). Keys and values travel from group to group (ring
// attention, arXiv:2310.01889). A group consists of neighbours: all ranks, some of them, or only
// one. Docs: docs/parallel.md.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// A view of a core with mesh.sequence > 1, for the model's thread. All ranks of a sequence make the
// same calls in the same order. The operators also make the exchanges of their backward. Second
// derivatives throw RuntimeFault.
class PENSTOCK_API SequenceRanks {
 public:
  // [all ranks] Must be called once per core. `num_neighbours`: number of ranks per group, a
  // divisor of count(). Throws ConfigError if sequences are not cut, and RuntimeFault if the ranks
  // cannot be connected.
  SequenceRanks(const Core& core, int num_neighbours);

  int index() const;
  int count() const;

  // Changes the dim along which neighbours have parts, from `join_dim` to `cut_dim`. `part` is this
  // rank's part along `join_dim` and has all of `cut_dim`. The result is this rank's part along
  // `cut_dim` and has all of `join_dim`. Throws c10::Error if the size along `cut_dim` is not
  // divisible by the number of neighbours.
  at::Tensor all_to_all(const at::Tensor& part, int64_t cut_dim, int64_t join_dim) const;
  // Returns causal attention over full sequences for this rank's heads and its group's tokens.
  // `query`, `key` and `value` have the same heads and tokens. For the shapes, see
  // src/parallel/ring_attention.h; a rank there is a group here. `attended` [batch, tokens] bool:
  // keys that may be attended to.
  at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const std::optional<at::Tensor>& attended, double scale) const;
  // Returns the loss: the sum of the ranks' addends. `addend` []: the summed losses of this rank's
  // tokens, divided by the number of tokens of all ranks. The engine then averages gradients over
  // these ranks as over data ranks.
  at::Tensor sum_losses(const at::Tensor& addend) const;
  // Throws RuntimeFault on all ranks of the sequence if they were given different sequences.
  void compare(const std::vector<at::Tensor>& inputs, const std::string& others) const;

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
