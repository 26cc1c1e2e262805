#pragma once
// Operators that tensor ranks compute together, each with its own backward.
//
// [Note: Tensor axis] A value is, over the tensor axis: whole (I: the same on all ranks, used
// alike; its gradient is the same on all); replicated (R: the same, then used with what is each
// rank's own; each has an addend of its gradient); cut (V); or partial (P: each has an addend of
// it). These are the ways from one to another; which one is meant decides what backward does, so
// each has a name (Megatron-LM, arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2.2).
//
// Peers outlive what is computed. No second derivatives.
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "src/parallel/peers.h"

namespace penstock::parallel {

constexpr int64_t kTokens = 1;  // the dimension of tokens in hidden states [batch, tokens, size]

// The peers of one operator, and what its exchanges are called: the layer, say.
struct OperatorPeers {
  std::shared_ptr<Peers> peers;
  comm::Label label{"tensor ranks"};

  Peers& operator*() const { return *peers; }
  Peers* operator->() const { return peers.get(); }
};

at::Tensor replicate(const at::Tensor& whole, const OperatorPeers& peers);  // I to R; backward sums
// As replicate(), where the last one was of the same value and is still in use: that. So layers
// that read one value (queries, keys, values) have its gradient added up once, together.
class Replicated {
 public:
  at::Tensor of(const at::Tensor& whole, const OperatorPeers& peers);

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
  Weak input_{c10::intrusive_ptr<c10::TensorImpl>()},
      output_{c10::intrusive_ptr<c10::TensorImpl>()};
  int64_t version_ = 0;
};
at::Tensor sum(const at::Tensor& partial, const OperatorPeers& peers);  // P to I; backward: nothing
at::Tensor sum_and_cut(const at::Tensor& partial, int64_t dim,
                       const OperatorPeers& peers);                                  // P to V
at::Tensor gather(const at::Tensor& part, int64_t dim, const OperatorPeers& peers);  // V to R
// V to I: `size` along `dim`, of which each rank has its share() (penstock/cut.h).
at::Tensor gather_whole(const at::Tensor& part, int64_t dim, int64_t size,
                        const OperatorPeers& peers);
at::Tensor cut(const at::Tensor& whole, int64_t dim, const OperatorPeers& peers);  // I to V

// From a part along `join_dim` of all of `cut_dim` to all of it, of a part along `cut_dim`;
// backward is the way back. [.., tokens / ranks, .., heads, ..] -> [.., tokens, .., heads / ranks,
// ..] (DeepSpeed-Ulysses, arXiv:2309.14509).
at::Tensor all_to_all(const at::Tensor& part, int64_t cut_dim, int64_t join_dim,
                      const OperatorPeers& peers);
// The sum of the ranks' addends of one loss, whose gradients are averaged over them later: each
// addend's is as many times larger.
at::Tensor sum_losses(const at::Tensor& addend, const OperatorPeers& peers);

// input [..., in] (whole), weight [out / ranks, in], bias [out / ranks] -> [..., out / ranks]
// (cut).
at::Tensor column_linear(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const OperatorPeers& peers);
// input [..., in / ranks] (cut), weight [out, in / ranks], bias [out], which is added once, after
// the sum -> [..., out] (whole).
at::Tensor row_linear(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const OperatorPeers& peers);
// The same of input [batch, tokens, in / ranks] -> [batch, tokens / ranks, out] (cut): the bias,
// and all that follows, has an addend of its gradient on each rank (arXiv:2205.05198,
// section 4.2.2).
at::Tensor row_linear_tokens(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const OperatorPeers& peers);

// ids [...] (integers, whole), weight [own rows, columns] -> [..., columns] (whole). A rank has its
// share() of the vocabulary's rows, and no row is made up. Throws c10::IndexError, as torch does.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocabulary,
                     int64_t padding_idx, const OperatorPeers& peers);  // padding_idx < 0: none

// As torch.nn.functional.cross_entropy over all rows of the vocabulary, computed in fp32.
struct LossOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  bool mean = true;  // over the targets that count; else the sum
};
// logits [tokens, own rows] (cut), target [tokens] (whole) -> [] (whole, fp32). One exchange, of
// four values a token; logits are never gathered.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, int64_t vocabulary,
                         const LossOptions& options, const OperatorPeers& peers);

}  // namespace penstock::parallel
