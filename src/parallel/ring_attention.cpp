#include "src/parallel/ring_attention.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

namespace penstock::parallel {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// The scores of this rank's queries with the keys of one rank. Scores exist only for queries from
// `first_query` on and for the first `num_keys` keys. `causal`: queries and keys belong to the same
// tokens, so a query attends to the keys up to its own ([Note: Zigzag]).
struct Block {
  int64_t first_query = 0, num_keys = 0;
  bool causal = false;
};

Block block_of(int rank, int owner, int64_t tokens) {
  if (owner == rank) return {0, tokens, true};
  if (owner < rank) return {0, tokens / 2, false};
  return {tokens / 2, tokens, false};
}

at::ScalarType sum_type(const at::Tensor& values) {
  return values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Copies key heads so that there is one for each query head: [b, key heads, ...] -> [b, heads,
// ...].
at::Tensor for_each_head(const at::Tensor& keys, int64_t heads) {
  if (keys.size(1) == heads) return keys;
  return keys.repeat_interleave(heads / keys.size(1), 1);
}

// The backward of for_each_head().
at::Tensor for_key_heads(const at::Tensor& grads, int64_t key_heads) {
  if (grads.size(1) == key_heads) return grads;
  return grads.unflatten(1, {key_heads, grads.size(1) / key_heads}).sum(2);
}

// Some queries, and the keys of one block. All tensors have one number of heads.
struct Scores {
  at::Tensor query, key, value;
  at::Tensor attended{};  // [batch, keys] bool; undefined = all
  bool causal = false;
  double scale = 1.0;

  // torch's fused kernel for the CPU requires this of its caller.
  bool is_fused() const {
    return query.is_cpu() && !attended.defined() && query.size(-1) == value.size(-1) &&
           query.stride(-1) == 1;
  }
  // The most scores that exist at a time if the kernel is not fused: 16 MiB on the CPU, 128 MiB on
  // an accelerator, where small groups of queries would leave it idle.
  int64_t max_scores() const { return int64_t{1} << (query.is_cpu() ? 22 : 25); }
};

struct Attended {
  at::Tensor output;  // [batch, heads, queries, value size]
  at::Tensor sums;  // [batch, heads, queries]: logarithm of the sum of exp(score); kNothing = none
};

// Calls `body(first, scores)` for consecutive groups of queries. scores [b, h, queries, keys].
template <class Body>
void by_queries(const Scores& scores, const Body& body) {
  const at::ScalarType type = sum_type(scores.query);
  const at::Tensor query = scores.query.to(type), keys = scores.key.to(type).transpose(-2, -1);
  const int64_t num_keys = keys.size(-1), num_queries = query.size(2);
  const int64_t of_one = std::max<int64_t>(1, query.size(0) * query.size(1) * num_keys);
  const int64_t step =
      std::clamp<int64_t>(scores.max_scores() / of_one, 1, std::max<int64_t>(1, num_queries));
  for (int64_t first = 0; first < num_queries; first += step) {
    const int64_t count = std::min(step, num_queries - first);
    at::Tensor made = at::matmul(query.narrow(2, first, count), keys).mul_(scores.scale);
    if (scores.causal) {
      const auto options = made.options().dtype(at::kBool);
      made.masked_fill_(at::ones({count, num_keys}, options).tril(first).logical_not(), kNothing);
    }
    if (scores.attended.defined()) {
      made.masked_fill_(scores.attended.logical_not().unsqueeze(1).unsqueeze(1), kNothing);
    }
    body(first, made);
  }
}

// Returns exp(scores - sums) for scores [..., queries, any] and sums [..., queries]. It is 0 if a
// query attends to nothing.
at::Tensor weights_of(const at::Tensor& scores, const at::Tensor& sums) {
  const at::Tensor finite = sums.masked_fill(sums == kNothing, 0.0);
  return (scores - finite.unsqueeze(-1)).exp_();
}

Attended attend(const Scores& scores) {
  const at::ScalarType type = sum_type(scores.query);
  if (scores.is_fused()) {
    auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        scores.query, scores.key, scores.value, 0.0, scores.causal, {}, scores.scale);
    return {output.to(type), sums.to(type)};
  }
  const at::Tensor value = scores.value.to(type);
  std::vector<at::Tensor> outputs, sums;
  by_queries(scores, [&](int64_t, const at::Tensor& made) {
    sums.push_back(made.logsumexp(-1));
    outputs.push_back(at::matmul(weights_of(made, sums.back()), value));
  });
  return {at::cat(outputs, 2), at::cat(sums, 2)};
}

// Gradients of query, key and value. `output`, `sums` and `grad` belong to the queries and to all
// keys of the sequences, not only to those of this block.
std::array<at::Tensor, 3> backward_of(const Scores& scores, const Attended& whole,
                                      const at::Tensor& grad) {
  const at::ScalarType type = sum_type(scores.query);
  if (scores.is_fused()) {
    auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, scores.query, scores.key, scores.value, whole.output, whole.sums, 0.0, scores.causal,
        {}, scores.scale);
    return {query.to(type), key.to(type), value.to(type)};
  }
  const at::Tensor grad_out = grad.to(type), value = scores.value.to(type);
  const at::Tensor query = scores.query.to(type), key = scores.key.to(type);
  const at::Tensor products = (grad_out * whole.output.to(type)).sum(-1, true);
  std::vector<at::Tensor> queries;
  const at::Tensor keys = at::zeros_like(key), values = at::zeros_like(value);
  by_queries(scores, [&](int64_t first, const at::Tensor& made) {
    const int64_t count = made.size(2);
    const auto rows = [&](const at::Tensor& one) { return one.narrow(2, first, count); };
    const at::Tensor weights = weights_of(made, rows(whole.sums));
    values.add_(at::matmul(weights.transpose(-2, -1), rows(grad_out)));
    const at::Tensor grads =
        (at::matmul(rows(grad_out), value.transpose(-2, -1)) - rows(products)) * weights *
        scores.scale;
    queries.push_back(at::matmul(grads, key));
    keys.add_(at::matmul(grads.transpose(-2, -1), rows(query)));
  });
  return {at::cat(queries, 2), keys, values};
}

// The exchange around the ring, and what this rank needs to use the values that arrive.
struct Ring : torch::CustomClassHolder {
  OperatorPeers peers;
  double scale = 1.0;
  int64_t key_size = 0;
  std::array<at::Tensor, 2> attended;  // by half of a part: [ranks, batch, tokens] bool

  // Returns the rank whose keys are here after `hops`.
  int owner(int hops) const { return (peers->rank() - hops + peers->size()) % peers->size(); }

  // `travelling` [batch, key heads, tokens, key size + value size].
  Scores scores(const Block& block, int owner, const at::Tensor& query,
                const at::Tensor& travelling) const {
    const int64_t heads = query.size(1);
    const at::Tensor seen = travelling.narrow(2, 0, block.num_keys);
    Scores made{.query = query.narrow(2, block.first_query, query.size(2) - block.first_query),
                .key = for_each_head(seen.narrow(-1, 0, key_size), heads),
                .value = for_each_head(seen.narrow(-1, key_size, seen.size(-1) - key_size), heads),
                .causal = block.causal,
                .scale = scale};
    if (attended[0].defined()) {
      const at::Tensor both = at::cat({attended[0][owner], attended[1][owner]}, 1);
      made.attended = both.narrow(1, 0, block.num_keys);
    }
    return made;
  }
};

struct RingFunction : torch::autograd::Function<RingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value,
                            const c10::intrusive_ptr<Ring>& ring) {
    const at::AutoDispatchBelowADInplaceOrView no_views;  // as in tensor_operators.cpp
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Peers& peers = *ring->peers;
    at::Tensor travelling = at::cat({key, value}, -1);
    Attended whole;
    for (int hops = 0; hops < peers.size(); ++hops) {
      if (hops > 0) travelling = peers.shift(travelling, ring->peers.label);
      const Block block = block_of(peers.rank(), ring->owner(hops), query.size(2));
      const Attended made = attend(ring->scores(block, ring->owner(hops), query, travelling));
      if (hops == 0) {  // this rank's own keys, which all of its queries attend to
        whole = made;
        continue;
      }
      add(whole, block, made);
    }
    whole.output = whole.output.to(query.scalar_type()).contiguous();
    context->save_for_backward({query, key, value, whole.output, whole.sums});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return whole.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Ring& ring = static_cast<Ring&>(*context->saved_data["ring"].toCapsule());
    Peers& peers = *ring.peers;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &query = saved[0], &key = saved[1], &value = saved[2], grad = grads[0];
    const Attended whole{saved[3], saved[4]};
    const at::ScalarType type = sum_type(query);
    at::Tensor travelling = at::cat({key, value}, -1);
    at::Tensor travelling_grad = at::zeros(travelling.sizes(), travelling.options().dtype(type));
    const at::Tensor query_grad = at::zeros(query.sizes(), query.options().dtype(type));
    for (int hops = 0; hops < peers.size(); ++hops) {
      if (hops > 0) travelling = peers.shift(travelling, ring.peers.label);
      const Block block = block_of(peers.rank(), ring.owner(hops), query.size(2));
      const auto rows = [&](const at::Tensor& one) {
        return one.narrow(2, block.first_query, one.size(2) - block.first_query);
      };
      const std::array<at::Tensor, 3> made =
          backward_of(ring.scores(block, ring.owner(hops), query, travelling),
                      {rows(whole.output), rows(whole.sums)}, rows(grad));
      rows(query_grad).add_(made[0]);
      const at::Tensor both =
          at::cat({for_key_heads(made[1], key.size(1)), for_key_heads(made[2], key.size(1))}, -1);
      travelling_grad.narrow(2, 0, block.num_keys).add_(both);
      // After as many hops as there are ranks, the gradient is at the rank that has the keys.
      travelling_grad = peers.shift(travelling_grad, ring.peers.label);
    }
    const auto of = [&](const at::Tensor& like, int64_t first) {
      return travelling_grad.narrow(-1, first, like.size(-1)).to(like.scalar_type());
    };
    return {query_grad.to(query.scalar_type()), of(key, 0), of(value, key.size(-1)), {}};
  }

 private:
  // Adds the keys of one more block to those that the queries attend to.
  static void add(const Attended& whole, const Block& block, const Attended& made) {
    const int64_t first = block.first_query, count = whole.sums.size(2) - first;
    const at::Tensor output = whole.output.narrow(2, first, count);
    const at::Tensor sums = whole.sums.narrow(2, first, count);
    const at::Tensor both = at::logaddexp(sums, made.sums);
    output.mul_(weights_of(sums.unsqueeze(-1), both))
        .add_(made.output * weights_of(made.sums.unsqueeze(-1), both));
    sums.copy_(both);
  }
};

// Returns the values in the dtype in which torch's attention computes under autocast.
at::Tensor cast_by_autocast(const at::Tensor& values) {
  const at::DeviceType type = values.device().type();
  const bool casts = at::autocast::is_autocast_enabled(type) && values.scalar_type() != at::kDouble;
  if (!casts) return values;
  return values.to(at::autocast::get_autocast_dtype(type));
}

}  // namespace

at::Tensor ring_attention(const at::Tensor& given_query, const at::Tensor& given_key,
                          const at::Tensor& given_value, const std::optional<at::Tensor>& attended,
                          double scale, const OperatorPeers& peers) {
  const at::Tensor query = cast_by_autocast(given_query), key = cast_by_autocast(given_key),
                   value = cast_by_autocast(given_value);
  const int64_t tokens = query.size(2), ranks = peers->size();
  TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && tokens % 2 == 0 &&
                  key.size(2) == tokens && value.size(2) == tokens &&
                  key.size(1) == value.size(1) && key.size(-1) == query.size(-1) &&
                  query.size(1) % key.size(1) == 0 && query.size(0) == key.size(0) &&
                  query.size(0) == value.size(0) && key.scalar_type() == query.scalar_type() &&
                  value.scalar_type() == query.scalar_type(),
              "[parallel::ring_attention] query ", query.sizes(), ", key ", key.sizes(),
              " and value ", value.sizes(), " do not fit together (see ring_attention.h)");
  const auto ring = c10::make_intrusive<Ring>();
  ring->peers = peers;
  ring->scale = scale;
  ring->key_size = key.size(-1);
  if (attended) {
    TORCH_CHECK(attended->sizes() == at::IntArrayRef({query.size(0), tokens * ranks}),
                "[parallel::ring_attention] attended has the sizes ", attended->sizes(),
                ", but must have [", query.size(0), ", ", tokens * ranks, "]");
    // The first half of all chunks, and the second half in reverse order.
    const at::Tensor chunks = attended->unflatten(1, {2 * ranks, tokens / 2}).movedim(1, 0);
    ring->attended = {chunks.narrow(0, 0, ranks), chunks.narrow(0, ranks, ranks).flip(0)};
  }
  return RingFunction::apply(query, key, value, ring);
}

}  // namespace penstock::parallel
