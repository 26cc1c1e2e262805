#pragma once
// Operators that tensor ranks compute together, each with its own backward.
//
// [Note: Tensor axis] Over the tensor axis, a value has one of four states. I (whole): equal on all
// ranks and used in the same way on all; its gradient is equal on all ranks. R (replicated): equal
// on all ranks, but combined with values that differ per rank; each rank has an addend of the
// gradient. V (cut): each rank has a part. P (partial): each rank has an addend. The operators
// convert from one state to another. The states before and after determine the backward, so each
// conversion has its own name (Megatron-LM, arXiv:1909.08053 section 3, arXiv:2205.05198 section
// 4.2.2).
//
// Peers must outlive the results. There are no second derivatives.
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "src/device/torch_compat.h"
#include "src/parallel/peer_exchange.h"

namespace penstock::parallel {

constexpr int64_t kTokens = 1;  // the dim of tokens in hidden states [batch, tokens, size]

// The peers of one operator, and the label of its exchanges, for example the layer's name.
struct OperatorPeers {
  std::shared_ptr<Peers> peers;
  comm::Label label{"tensor ranks"};

  Peers& operator*() const { return *peers; }
  Peers* operator->() const { return peers.get(); }
};

// Called by each backward. Throws RuntimeFault if it was started with create_graph.
void refuse_second_derivative();

at::Tensor replicate(const at::Tensor& whole, const OperatorPeers& peers);  // I to R; backward: sum
// Like replicate(), but if of() gets the same value again, the new result shares the backward of
// the previous result, as long as that backward is in use. So layers that read the same value
// (queries, keys, values) sum its gradient in one exchange.
class Replicated {
 public:
  at::Tensor of(const at::Tensor& whole, const OperatorPeers& peers);
  // Must be called when a forward begins. Otherwise, if only some ranks kept an earlier graph, the
  // ranks would make their sums in different orders.
  void forget() { backward_ = device::WeakNodePtr(device::NodePtr()); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl> input_{c10::intrusive_ptr<c10::TensorImpl>()};
  int64_t version_ = 0;
  device::WeakNodePtr backward_{device::NodePtr()};
};
// P to I. Its backward exchanges nothing.
at::Tensor sum(const at::Tensor& partial, const OperatorPeers& peers);
at::Tensor sum_and_cut(const at::Tensor& partial, int64_t dim,
                       const OperatorPeers& peers);                                  // P to V
at::Tensor gather(const at::Tensor& part, int64_t dim, const OperatorPeers& peers);  // V to R
// V to I: gathers `size` elements along `dim`. Each rank has its share() of them (penstock/cut.h).
at::Tensor gather_whole(const at::Tensor& part, int64_t dim, int64_t size,
                        const OperatorPeers& peers);
at::Tensor cut(const at::Tensor& whole, int64_t dim, const OperatorPeers& peers);  // I to V

// The input has a part of `join_dim` and all of `cut_dim`; the result has all of `join_dim` and a
// part of `cut_dim`. Backward is the inverse. [.., tokens / ranks, .., heads, ..] ->
// [.., tokens, .., heads / ranks, ..] (DeepSpeed-Ulysses, arXiv:2309.14509).
at::Tensor all_to_all(const at::Tensor& part, int64_t cut_dim, int64_t join_dim,
                      const OperatorPeers& peers);
// Returns the sum of the ranks' addends of one loss. Gradients are averaged over the ranks later,
// so backward multiplies the gradient of an addend by the number of ranks.
at::Tensor sum_losses(const at::Tensor& addend, const OperatorPeers& peers);

// input [..., in] (whole), weight [out / ranks, in], bias [out / ranks] -> [..., out / ranks]
// (cut).
at::Tensor column_linear(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const OperatorPeers& peers);
// input [..., in / ranks] (cut), weight [out, in / ranks], bias [out], which is added once after
// the sum -> [..., out] (whole).
at::Tensor row_linear(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const OperatorPeers& peers);
// Like row_linear(), for input [batch, tokens, in / ranks] -> [batch, tokens / ranks, out] (cut).
// Each rank has only an addend of the gradients of the bias and of all later parameters
// (arXiv:2205.05198, section 4.2.2).
at::Tensor row_linear_tokens(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const OperatorPeers& peers);

// ids [...] (integers, whole), weight [own rows, columns] -> [..., columns] (whole). A rank has its
// share() of the vocabulary's rows, without padding rows. Throws c10::IndexError for ids out
// of range, as torch does.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocabulary,
                     int64_t padding_idx, const OperatorPeers& peers);  // padding_idx < 0: none

// Options of torch.nn.functional.cross_entropy. The loss is over all rows of the vocabulary and is
// computed in fp32.
struct LossOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  bool mean = true;  // mean over the targets that are not ignored; false: sum
};
// logits [tokens, own rows] (cut), target [tokens] (whole) -> [] (whole, fp32). The call makes one
// exchange of four values per token and never gathers logits.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, int64_t vocabulary,
                         const LossOptions& options, const OperatorPeers& peers);

}  // namespace penstock::parallel
