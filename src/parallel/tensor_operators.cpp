#include "src/parallel/tensor_operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "penstock/cut.h"
#include "penstock/error.h"

namespace penstock::parallel {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Used in a forward. If a custom function returns a view, the model cannot change the result in
// place (`output += residual`). The result of an exchange has its own memory and is usually
// reshaped. Under this guard, reshaping does not make it a view.
using NoViews = at::AutoDispatchBelowADInplaceOrView;

// Throws c10::IndexError if `good` is false. On an accelerator the host does not wait for `good`:
// as in torch's own operators, the device reports the error.
void check_index(const at::Tensor& good, const char* what) {
  if (good.is_cpu()) {
    TORCH_CHECK_INDEX(good.item<bool>(), what);
  } else {
    at::_assert_async(good, what);
  }
}

enum class Transfer : uint8_t { kNothing, kSum, kSumAndCut, kGather, kCut, kAllToAll, kScale };

// `size`: total size along `dim` of a gather. `other_dim`: the dim along which an all-to-all joins.
at::Tensor go(Transfer way, const at::Tensor& values, int64_t dim, int64_t size, int64_t other_dim,
              const OperatorPeers& peers) {
  switch (way) {
    case Transfer::kNothing:
      break;
    case Transfer::kSum:
      return peers->sum(values, peers.label);
    case Transfer::kSumAndCut:
      return peers->sum_and_cut(values, dim, peers.label);
    case Transfer::kGather:
      return peers->gather(values, dim, size, peers.label);
    case Transfer::kCut:
      return peers->cut(values, dim);
    case Transfer::kAllToAll:
      return peers->all_to_all(values, dim, other_dim, peers.label);
    case Transfer::kScale:
      return values.mul(peers->size());
  }
  throw Bug("[parallel::go] unknown transfer");
}

// The state that an operator's backward needs.
struct Kept : torch::CustomClassHolder {
  OperatorPeers peers;
  Transfer back = Transfer::kNothing;
  int64_t dim = 0, size = -1, other_dim = 0;
  // Used only by embedding and cross_entropy.
  int64_t first = 0, padding_idx = -1, vocabulary = 0;
  double smoothing = 0;

  void save_in(AutogradContext* context) {
    context->saved_data["kept"] =
        c10::IValue::make_capsule(c10::intrusive_ptr<Kept>::reclaim_copy(this));
  }
  static Kept& of(AutogradContext* context) {
    refuse_second_derivative();
    return static_cast<Kept&>(*context->saved_data["kept"].toCapsule());
  }
};

c10::intrusive_ptr<Kept> kept_of(const OperatorPeers& peers) {
  auto kept = c10::make_intrusive<Kept>();
  kept->peers = peers;
  return kept;
}

struct WayFunction : torch::autograd::Function<WayFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& values, Transfer way,
                            const c10::intrusive_ptr<Kept>& kept) {
    kept->save_in(context);
    // Without an exchange, the result has the same values. It is a view so that it has its own
    // gradient.
    if (way == Transfer::kNothing) return values.view_as(values);
    const NoViews guard;
    return go(way, values, kept->dim, kept->size, kept->other_dim, kept->peers);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Kept& kept = Kept::of(context);
    if (kept.back == Transfer::kNothing) return {gradients[0], at::Tensor(), at::Tensor()};
    return {
        go(kept.back, gradients[0], kept.back == Transfer::kAllToAll ? kept.other_dim : kept.dim,
           kept.size, kept.dim, kept.peers),
        at::Tensor(), at::Tensor()};
  }
};

// `size`: total size along `dim` of a gather, or < 0 for equal parts.
at::Tensor way(const at::Tensor& values, Transfer there, Transfer back, int64_t dim,
               const OperatorPeers& peers, int64_t size = -1) {
  const auto kept = kept_of(peers);
  kept->back = back;
  kept->size = size;
  kept->dim = values.dim() == 0 ? 0 : c10::maybe_wrap_dim(dim, values.dim());
  return WayFunction::apply(values, there, kept);
}

// ---- embedding

struct VocabEmbeddingFunction : torch::autograd::Function<VocabEmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& ids,
                            const at::Tensor& weight, const c10::intrusive_ptr<Kept>& kept) {
    check_index(ids.ge(0).logical_and(ids.lt(kept->vocabulary)).all(),
                "index out of range in self");
    const at::Tensor own = ids.sub(kept->first);
    const at::Tensor elsewhere = own.lt(0).logical_or(own.ge(weight.size(0)));
    context->save_for_backward({own, elsewhere, weight});
    kept->save_in(context);
    const NoViews guard;
    // If there are fewer rows than ranks, a rank without rows adds zeros.
    if (weight.size(0) == 0) {
      std::vector<int64_t> sizes = ids.sizes().vec();
      sizes.push_back(weight.size(1));
      return kept->peers->sum(weight.new_zeros(sizes), kept->peers.label);
    }
    const at::Tensor found = at::embedding(weight, own.masked_fill(elsewhere, 0));
    return kept->peers->sum(found.masked_fill(elsewhere.unsqueeze(-1), 0), kept->peers.label);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Kept& kept = Kept::of(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &own = saved[0], &elsewhere = saved[1], &weight = saved[2];
    if (weight.size(0) == 0) return {at::Tensor(), at::zeros_like(weight), at::Tensor()};
    const at::Tensor gradient = gradients[0].masked_fill(elsewhere.unsqueeze(-1), 0);
    const int64_t padding = kept.padding_idx - kept.first;
    const bool pads = kept.padding_idx >= 0 && padding >= 0 && padding < weight.size(0);
    return {at::Tensor(),
            at::embedding_dense_backward(gradient, own.masked_fill(elsewhere, 0), weight.size(0),
                                         pads ? padding : -1, false),
            at::Tensor()};
  }
};

// ---- cross entropy

// A rank's values per token: the largest logit, the sum of exp(logit - largest), the target's logit
// (0 if it is on another rank), and the sum of the logits.
struct Local {
  at::Tensor most, exponentials, target, sum;
};

struct VocabCrossEntropyFunction : torch::autograd::Function<VocabCrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& target, const LossOptions& options,
                            const c10::intrusive_ptr<Kept>& kept) {
    const at::Tensor z = logits.to(at::kFloat);
    const at::Tensor counts = target.ne(options.ignore_index);
    check_index(target.ge(0)
                    .logical_and(target.lt(kept->vocabulary))
                    .logical_or(counts.logical_not())
                    .all(),
                "Target is out of bounds.");
    const at::Tensor own = target.sub(kept->first);
    const at::Tensor here = counts.logical_and(own.ge(0)).logical_and(own.lt(z.size(1)));
    // One exchange gathers these values of all ranks. They are combined in rank order, so the
    // result has the same bits everywhere.
    const Local local = look(z, own, here);
    const at::Tensor all = kept->peers->gather(
        at::stack({local.most, local.exponentials, local.target, local.sum}).unsqueeze(0), 0, -1,
        kept->peers.label);
    const at::Tensor most = std::get<0>(all.select(1, 0).max(0));
    // log(sum exp) over all ranks, relative to the largest logit.
    const at::Tensor scales = all.select(1, 0).sub(most).exp();
    const at::Tensor log_sum = all.select(1, 1).mul(scales).sum(0).log().add(most);
    const double smoothing = options.label_smoothing;
    at::Tensor losses = log_sum.sub(all.select(1, 2).sum(0), 1.0 - smoothing);
    if (smoothing > 0) {
      losses =
          losses.sub(all.select(1, 3).sum(0), smoothing / static_cast<double>(kept->vocabulary));
    }
    losses = losses.masked_fill(counts.logical_not(), 0);
    const at::Tensor divisor =
        options.mean ? counts.sum().to(at::kFloat) : at::ones({}, losses.options());
    kept->smoothing = smoothing;
    kept->save_in(context);
    context->save_for_backward({z, log_sum, own, here, counts, divisor});
    context->saved_data["dtype"] = static_cast<int64_t>(logits.scalar_type());
    return losses.sum().div(divisor);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Kept& kept = Kept::of(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &z = saved[0], &log_sum = saved[1], &own = saved[2], &here = saved[3];
    const at::Tensor &counts = saved[4], &divisor = saved[5];
    // The gradient is softmax - (1 - smoothing) onehot - smoothing / vocabulary, for this rank's
    // columns.
    at::Tensor gradient = z.sub(log_sum.unsqueeze(1)).exp_();
    if (kept.smoothing > 0) {
      gradient.sub_(kept.smoothing / static_cast<double>(kept.vocabulary));
    }
    if (z.size(1) > 0) {
      const at::Tensor index = own.masked_fill(here.logical_not(), 0).unsqueeze(1);
      gradient.scatter_add_(1, index, here.to(at::kFloat).mul(kept.smoothing - 1).unsqueeze(1));
    }
    gradient.mul_(gradients[0].to(at::kFloat).div(divisor));
    gradient.masked_fill_(counts.logical_not().unsqueeze(1), 0);
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    return {gradient.to(dtype), at::Tensor(), at::Tensor(), at::Tensor()};
  }

  static Local look(const at::Tensor& z, const at::Tensor& own, const at::Tensor& here) {
    constexpr float kLeast = -std::numeric_limits<float>::infinity();
    const at::Tensor none = z.new_zeros({z.size(0)});
    if (z.size(1) == 0) return {none.add(kLeast), none, none, none};
    const at::Tensor most = std::get<0>(z.max(1));
    // If all logits are masked (-inf), the sum of exponentials is 0.
    const at::Tensor from = most.masked_fill(most.eq(kLeast), 0).unsqueeze(1);
    const at::Tensor index = own.masked_fill(here.logical_not(), 0).unsqueeze(1);
    const at::Tensor found = z.gather(1, index).squeeze(1);
    return {most, z.sub(from).exp_().sum(1), at::where(here, found, none), z.sum(1)};
  }
};

}  // namespace

// Autograd enables gradients in a backward only with create_graph.
void refuse_second_derivative() {
  if (!at::GradMode::is_enabled()) return;
  throw RuntimeFault(
      "[parallel::backward] operators of several tensor or sequence ranks have no second "
      "derivative (create_graph)");
}

at::Tensor replicate(const at::Tensor& whole, const OperatorPeers& peers) {
  return way(whole, Transfer::kNothing, Transfer::kSum, 0, peers);
}
at::Tensor Replicated::of(const at::Tensor& whole, const OperatorPeers& peers) {
  if (!at::GradMode::is_enabled() || !whole.requires_grad()) return whole;
  const bool known =
      input_.lock().get() == whole.unsafeGetTensorImpl() && version_ == whole._version();
  if (known) {
    // The previous result itself may be gone: a layer may keep only a view of it.
    if (auto backward = backward_.lock()) {
      at::Tensor made = whole.detach();
      torch::autograd::impl::set_gradient_edge(made, torch::autograd::Edge(backward, 0));
      return made;
    }
  }
  at::Tensor made = replicate(whole, peers);
  input_ = c10::weak_intrusive_ptr<c10::TensorImpl>(whole.getIntrusivePtr());
  version_ = whole._version();
  backward_ = device::WeakNodePtr(made.grad_fn());
  return made;
}

at::Tensor sum(const at::Tensor& partial, const OperatorPeers& peers) {
  return way(partial, Transfer::kSum, Transfer::kNothing, 0, peers);
}
at::Tensor sum_and_cut(const at::Tensor& partial, int64_t dim, const OperatorPeers& peers) {
  return way(partial, Transfer::kSumAndCut, Transfer::kGather, dim, peers);
}
at::Tensor gather(const at::Tensor& part, int64_t dim, const OperatorPeers& peers) {
  return way(part, Transfer::kGather, Transfer::kSumAndCut, dim, peers);
}
at::Tensor gather_whole(const at::Tensor& part, int64_t dim, int64_t size,
                        const OperatorPeers& peers) {
  return way(part, Transfer::kGather, Transfer::kCut, dim, peers, size);
}
at::Tensor cut(const at::Tensor& whole, int64_t dim, const OperatorPeers& peers) {
  return way(whole, Transfer::kCut, Transfer::kGather, dim, peers);
}

at::Tensor all_to_all(const at::Tensor& part, int64_t cut_dim, int64_t join_dim,
                      const OperatorPeers& peers) {
  const auto kept = kept_of(peers);
  kept->back = Transfer::kAllToAll;
  kept->dim = c10::maybe_wrap_dim(cut_dim, part.dim());
  kept->other_dim = c10::maybe_wrap_dim(join_dim, part.dim());
  return WayFunction::apply(part, Transfer::kAllToAll, kept);
}

at::Tensor sum_losses(const at::Tensor& addend, const OperatorPeers& peers) {
  return way(addend, Transfer::kSum, Transfer::kScale, 0, peers);
}

at::Tensor column_linear(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const OperatorPeers& peers) {
  return at::linear(replicate(input, peers), weight, bias);
}

namespace {

at::Tensor with_bias(const at::Tensor& output, const std::optional<at::Tensor>& bias) {
  return bias ? output.add(bias->to(output.scalar_type())) : output;
}

}  // namespace

at::Tensor row_linear(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const OperatorPeers& peers) {
  return with_bias(sum(at::linear(input, weight), peers), bias);
}

at::Tensor row_linear_tokens(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const OperatorPeers& peers) {
  return with_bias(sum_and_cut(at::linear(input, weight), kTokens, peers), bias);
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocabulary,
                     int64_t padding_idx, const OperatorPeers& peers) {
  const auto [first, end] = share(vocabulary, peers->rank(), peers->size());
  TORCH_CHECK(weight.dim() == 2 && weight.size(0) == end - first, "[parallel::embedding] rank ",
              peers->rank(), " of ", peers->size(), " has ", end - first, " of ", vocabulary,
              " rows, but the weight has ", weight.size(0));
  const auto kept = kept_of(peers);
  kept->first = first;
  kept->padding_idx = padding_idx;
  kept->vocabulary = vocabulary;
  return VocabEmbeddingFunction::apply(ids, weight, kept);
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, int64_t vocabulary,
                         const LossOptions& options, const OperatorPeers& peers) {
  const auto [first, end] = share(vocabulary, peers->rank(), peers->size());
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) == end - first && target.dim() == 1 &&
                  target.size(0) == logits.size(0),
              "[parallel::cross_entropy] expected logits [tokens, ", end - first,
              "] and target [tokens], got ", logits.sizes(), " and ", target.sizes());
  TORCH_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1,
              "[parallel::cross_entropy] label_smoothing is ", options.label_smoothing,
              ", which is not between 0 and 1");
  const auto kept = kept_of(peers);
  kept->first = first;
  kept->vocabulary = vocabulary;
  return VocabCrossEntropyFunction::apply(logits, target, options, kept);
}

}  // namespace penstock::parallel
