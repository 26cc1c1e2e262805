#pragma once
// TensorRanks: what modules compute with when the ranks of the tensor axis have cut their weights
// (config keys "mesh.tensor" and "parallel"). Docs: docs/parallel.md.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"
#include "penstock/tiling.h"

namespace penstock {

// A module that the rules cut.
struct TensorModule {
  int index = 0;  // in modules()
  std::string name;
  std::string style;        // "column", "row", ... (docs/parallel.md)
  bool transposed = false;  // its weight is [in, out]
  int64_t heads = 0;        // of style "shared": key and value heads, fewer than ranks
  int64_t size = 0;         // of its output over all ranks
  bool gathered = false;    // its input is made of gather_tokens()
};

// A view of a core with mesh.tensor > 1, for the thread that runs the model. All tensor ranks make
// the same calls in the same order, inside the model's forward; backwards exchange by themselves.
// No second derivatives (RuntimeFault).
class PENSTOCK_API TensorRanks {
 public:
  // Throws ConfigError where nothing is cut.
  explicit TensorRanks(const Core& core);

  int index() const;
  int count() const;
  const std::vector<TensorModule>& modules() const;

  // As torch.nn.functional.linear by the module's style. input [..., in], or [..., in / ranks] for
  // "row"; weight and bias are this rank's -> [..., out], or [..., out / ranks] for "column" and
  // "shared".
  at::Tensor linear(const TensorModule& how, const at::Tensor& input, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias) const;
  // Of a head of style "vocab", whose output is cut: input [..., in] -> [..., own columns]; all of
  // it, [..., out]; and its cross-entropy with target [tokens] -> [], computed in fp32 from logits
  // [tokens, own columns], which are not gathered ("none" is no reduction of it).
  at::Tensor cut_logits(const TensorModule& how, const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) const;
  at::Tensor whole_logits(const TensorModule& how, const at::Tensor& logits) const;
  at::Tensor cross_entropy(const TensorModule& how, const at::Tensor& logits,
                           const at::Tensor& target, const CrossEntropyOptions& options) const;
  // Hidden states [batch, tokens, size] whose tokens are cut between the layers ("row_tokens"):
  // from the same on all ranks to a rank's [batch, tokens / ranks, size], and back; and what the
  // module `name` makes of parts, all of them, of whose gradient each rank has an addend.
  at::Tensor cut_tokens(const at::Tensor& whole) const;
  at::Tensor whole_tokens(const at::Tensor& part) const;
  at::Tensor gather_tokens(const std::string& name, const at::Tensor& part) const;
  // ids [...] (integers) -> [..., columns], or [..., columns / ranks] for "column". `padding_idx` <
  // 0: none. Throws c10::IndexError, as torch does.
  at::Tensor embedding(const TensorModule& how, const at::Tensor& ids, const at::Tensor& weight,
                       int64_t padding_idx) const;
  // Throws RuntimeFault on all tensor ranks where they have not the same inputs of a forward
  // (values and a text of what else counts). Returns whether they have the same `draws`.
  bool compare(const std::vector<at::Tensor>& inputs, const std::string& others,
               const std::string& draws) const;

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
