#pragma once
// TensorRanks: operators for modules whose weights are cut over the tensor axis (config keys
// "mesh.tensor" and "parallel"). Docs: docs/parallel.md.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/cut.h"
#include "penstock/export.h"
#include "src/tiles/tiling.h"

namespace penstock {

// A module that the rules cut.
struct TensorModule {
  int index = 0;  // index in modules()
  std::string name;
  std::string style;        // "column", "row", ... (docs/parallel.md)
  bool transposed = false;  // its weight is [in, out]
  int64_t heads = 0;        // style "shared": number of key and value heads, fewer than ranks
  int64_t size = 0;         // size of its whole output
  bool gathered = false;    // the module's input is computed from the result of gather_tokens()
};

// A view of a core with mesh.tensor > 1, for the model's thread. All tensor ranks make the same
// calls in the same order, inside the model's forward. The operators also make the exchanges of
// their backward. Second derivatives throw RuntimeFault.
class PENSTOCK_API TensorRanks {
 public:
  // Throws ConfigError if nothing is cut.
  explicit TensorRanks(const Core& core);

  int index() const;
  int count() const;
  const std::vector<TensorModule>& modules() const;

  // Computes torch.nn.functional.linear in the module's style. input [..., in], or [..., in /
  // ranks] for "row"; weight and bias are this rank's parts -> [..., out], or [..., out / ranks]
  // for "column" and "shared".
  at::Tensor linear(const TensorModule& how, const at::Tensor& input, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias) const;
  // For a head of style "vocab" whose logits stay cut. cut_logits: input [..., in] -> [..., own
  // columns]. whole_logits: -> [..., out]. cross_entropy: logits [tokens, own columns], target
  // [tokens] -> [], computed in fp32 without gathering the logits. Throws ConfigError for the
  // reduction "none".
  at::Tensor cut_logits(const TensorModule& how, const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) const;
  at::Tensor whole_logits(const TensorModule& how, const at::Tensor& logits) const;
  at::Tensor cross_entropy(const TensorModule& how, const at::Tensor& logits,
                           const at::Tensor& target, const CrossEntropyOptions& options) const;
  // Hidden states [batch, tokens, size] whose tokens are cut between layers ("row_tokens").
  // cut_tokens: from equal tensors on all ranks to each rank's [batch, tokens / ranks, size].
  // whole_tokens: the reverse. gather_tokens: joins the parts to the whole input of module `name`;
  // each rank has one addend of the input's gradient.
  at::Tensor cut_tokens(const at::Tensor& whole) const;
  at::Tensor whole_tokens(const at::Tensor& part) const;
  at::Tensor gather_tokens(const std::string& name, const at::Tensor& part) const;
  // ids [...] (integers) -> [..., columns], or [..., columns / ranks] for "column". `padding_idx` <
  // 0: no padding index. Throws c10::IndexError for a wrong id, as torch does.
  at::Tensor embedding(const TensorModule& how, const at::Tensor& ids, const at::Tensor& weight,
                       int64_t padding_idx) const;
  // Throws RuntimeFault on all tensor ranks if the inputs of a forward (the tensors' values or the
  // text `others`) differ between ranks. Returns whether `draws` (the state of random number
  // generators) is the same on all ranks.
  bool compare(const std::vector<at::Tensor>& inputs, const std::string& others,
               const std::string& draws) const;
  // While set, exchanges do not count as exchanges of the model's layers, because they only check
  // rules.
  void set_checking(bool checks) const;
  // The cuts of all parameters whose cut is not kWhole, by name.
  const std::map<std::string, Cut>& cuts() const;
  // Returns the values of all tensor ranks, [..] -> [ranks, ..]. `what` names the exchange in
  // errors. Sizes and dtype must be equal on all ranks. There is no backward.
  at::Tensor all_of(const std::string& what, const at::Tensor& values) const;

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
