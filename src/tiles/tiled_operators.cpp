// Operators on a tiled weight ([Note: Tiles], weights.h). Each has its own backward. A tile's
// gradient goes to the engine as soon as it is computed, so at most one such gradient exists at a
// time.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "penstock/error.h"
#include "src/tiles/tiling.h"
#include "src/tiles/weights.h"

namespace penstock {

namespace tiles {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The arguments of an operator, kept for its backward.
struct TileOp : torch::CustomClassHolder {
  std::weak_ptr<TiledWeights> owner;
  size_t index = 0;  // index in `owner`
  int64_t padding_idx = -1;
  bool scale_grad_by_freq = false;
  CrossEntropyOptions loss;
  int64_t tokens = 1;                   // number of tokens in a chunk
  at::ScalarType out = at::kFloat;      // dtype of the loss
  at::ScalarType compute = at::kFloat;  // dtype of the products; autocast may have chosen it
  at::Tensor bias;                      // the values at the time of the forward
  bool has_bias = false;                // the operator has a bias among its inputs

  std::shared_ptr<TiledWeights> weights() const {
    const auto weights = owner.lock();
    if (!weights) throw RuntimeFault("[tiles::TileOp] the engine is closed");
    weights->check_open();
    return weights;
  }
  void save_in(AutogradContext* context) {
    context->saved_data["op"] =
        c10::IValue::make_capsule(c10::intrusive_ptr<TileOp>::reclaim_copy(this));
  }
  static TileOp& of(AutogradContext* context) {
    return static_cast<TileOp&>(*context->saved_data["op"].toCapsule());
  }

  at::Tensor bias_of(const TiledWeight& one, size_t tile) const {
    return bias.defined() ? bias.narrow(0, one.first[tile], one.rows(tile)) : at::Tensor();
  }

  // Calls work(tile, weight) for each tile while its weight has values.
  template <class Work>
  void forward(const Work& work) const {
    const auto weights = this->weights();
    const TiledWeight& one = weights->at(index);
    for (size_t tile = 0; tile < one.tiles.size(); ++tile) {
      weights->host().enter_tile(one.units[tile]);
      work(one, tile, one.tiles[tile].detach());
      weights->host().leave_tile(one.units[tile], Mark::kUse);
    }
  }

  // Like forward(), from the last tile to the first. `work` returns the weight's gradient. `uses`:
  // `work` reads the weight; if false, the weight is not gathered and has no values. `trains`: the
  // gradient is needed.
  template <class Work>
  void backward(bool uses, bool trains, const Work& work) const {
    const auto weights = this->weights();
    Host& host = weights->host();
    host.run_in_backward([&] {
      check_backward(host, uses, trains);
      const TiledWeight& one = weights->at(index);
      for (size_t tile = one.tiles.size(); tile-- > 0;) {
        const int unit = one.units[tile];
        if (uses) host.enter_tile(unit);
        const at::Tensor gradient = work(one, tile, one.tiles[tile].detach());
        if (trains) host.take_tile_gradient(unit, gradient);
        // Tells the engine whether the tile was gathered, has a gradient, or both.
        host.leave_tile(unit, !trains ? Mark::kUse : uses ? Mark::kWhole : Mark::kGradient);
      }
    });
  }

  static void check_backward(Host& host, bool uses, bool trains) {
    if (at::GradMode::is_enabled()) {
      throw RuntimeFault(
          "[tiles::check_backward] a tiled layer has no second derivative (create_graph). Keep the "
          "layer out of \"tiling.modules\"");
    }
    if (host.begin_tile_backward(uses) || !trains) return;
    throw RuntimeFault(
        "[tiles::check_backward] torch.autograd.grad() cannot return the gradient of a tiled "
        "parameter, because it is never whole. Use engine.backward() and engine.full_grads(), or "
        "keep the parameter's module out of \"tiling.modules\"");
  }
};

using MaybeBias = std::optional<at::Tensor>;

// Returns the bias as an input of the operator, so that autograd records an edge to its gradient.
MaybeBias edge(const Bias& bias) {
  return bias.param.defined() ? MaybeBias(bias.param) : std::nullopt;
}

// sum += a @ b in fp32, for any dtype of a and b.
void add_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == at::kFloat) {
    sum.addmm_(a, b);
  } else {
    sum.add_(at::mm(a, b));
  }
}

at::Tensor zeros32(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::zeros(sizes, at::TensorOptions(at::kFloat).device(like.device()));
}

// Returns the sizes of `tensor`, with the last one replaced by `last`.
std::vector<int64_t> with_last(const at::Tensor& tensor, int64_t last) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = last;
  return sizes;
}

// ---- linear

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const c10::intrusive_ptr<TileOp>& op,
                            const at::Tensor& input, const at::Tensor& whole,
                            const MaybeBias& /*its edge*/) {
    const at::Tensor rows = input.reshape({-1, input.size(-1)});
    at::Tensor output;
    op->forward([&](const TiledWeight& one, size_t tile, const at::Tensor& weight) {
      const at::Tensor part = at::linear(rows, weight, op->bias_of(one, tile));
      op->compute = part.scalar_type();
      if (one.tiles.size() == 1) {
        output = part;
        return;
      }
      if (!output.defined()) output = at::empty({rows.size(0), whole.size(0)}, part.options());
      output.narrow(1, one.first[tile], one.rows(tile)).copy_(part);
    });
    op->bias.reset();
    op->save_in(context);
    context->save_for_backward({input});
    return output.view(with_last(input, whole.size(0)));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const TileOp& op = TileOp::of(context);
    const at::Tensor input = context->get_saved_variables()[0];
    const at::Tensor outer =
        gradients[0].reshape({-1, gradients[0].size(-1)}).to(op.compute).contiguous();
    const at::Tensor rows = input.reshape({-1, input.size(-1)}).to(op.compute);
    const bool wants_input = context->needs_input_grad(0), trains = context->needs_input_grad(1);
    at::Tensor to_input = wants_input ? zeros32(rows.sizes(), rows) : at::Tensor();
    op.backward(wants_input, trains,
                [&](const TiledWeight& one, size_t tile, const at::Tensor& weight) {
                  const at::Tensor part = outer.narrow(1, one.first[tile], one.rows(tile));
                  if (wants_input) add_product(to_input, part, weight.to(op.compute));
                  return trains ? at::mm(part.t(), rows) : at::Tensor();
                });
    if (wants_input) to_input = to_input.view(input.sizes()).to(input.scalar_type());
    const bool wants_bias = op.has_bias && context->needs_input_grad(2);
    return {at::Tensor(), to_input, at::Tensor(), wants_bias ? outer.sum(0) : at::Tensor()};
  }
};

// ---- embedding

struct TiledEmbeddingFunction : torch::autograd::Function<TiledEmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const c10::intrusive_ptr<TileOp>& op,
                            const at::Tensor& ids, const at::Tensor& whole) {
    const at::Tensor flat = ids.reshape({-1});
    TORCH_CHECK_INDEX(flat.numel() == 0 || (flat.min().item<int64_t>() >= 0 &&
                                            flat.max().item<int64_t>() < whole.size(0)),
                      "index out of range in self");
    at::Tensor output = at::empty({flat.numel(), whole.size(1)}, whole.options());
    op->forward([&](const TiledWeight& one, size_t tile, const at::Tensor& weight) {
      const auto [places, own] = ids_in(flat, one, tile);
      output.index_copy_(0, places, weight.index_select(0, own));
    });
    op->save_in(context);
    context->save_for_backward({ids});
    std::vector<int64_t> sizes = ids.sizes().vec();
    sizes.push_back(whole.size(1));
    return output.view(sizes);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const TileOp& op = TileOp::of(context);
    const at::Tensor flat = context->get_saved_variables()[0].reshape({-1});
    const at::Tensor rows = gradients[0].reshape({flat.numel(), gradients[0].size(-1)});
    op.backward(false, context->needs_input_grad(1),
                [&](const TiledWeight& one, size_t tile, const at::Tensor&) {
                  const auto [places, own] = ids_in(flat, one, tile);
                  const int64_t padding = op.padding_idx - one.first[tile];
                  const bool here = op.padding_idx >= 0 && padding >= 0 && padding < one.rows(tile);
                  return at::embedding_dense_backward(rows.index_select(0, places), own,
                                                      one.rows(tile), here ? padding : -1,
                                                      op.scale_grad_by_freq);
                });
    return {at::Tensor(), at::Tensor(), at::Tensor()};
  }

  // Returns the positions of the ids that are in this tile, and the rows of these ids in the tile.
  static std::pair<at::Tensor, at::Tensor> ids_in(const at::Tensor& flat, const TiledWeight& one,
                                                  size_t tile) {
    const at::Tensor mine = flat.ge(one.first[tile]).logical_and_(flat.lt(one.first[tile + 1]));
    const at::Tensor places = mine.nonzero().squeeze(1);
    return {places, flat.index_select(0, places).sub_(one.first[tile])};
  }
};

// ---- cross-entropy

struct TiledCrossEntropyFunction : torch::autograd::Function<TiledCrossEntropyFunction> {
  // The fp32 logits of some tokens for one tile. `columns` has the target's column in the tile;
  // `hit` is true if that column lies in the tile.
  struct Operands {
    at::Tensor input, weight, target;
  };
  struct RowChunk {
    int64_t begin, count;
    at::Tensor hidden, logits, columns, hit;

    at::Tensor of(const at::Tensor& tokens) const { return tokens.narrow(0, begin, count); }
  };

  static RowChunk chunk(TileOp& op, const TiledWeight& one, size_t tile, int64_t begin,
                        const Operands& of) {
    RowChunk chunk{begin, std::min(op.tokens, of.input.size(0) - begin), {}, {}, {}, {}};
    chunk.hidden = chunk.of(of.input);
    const at::Tensor logits = at::linear(chunk.hidden, of.weight, op.bias_of(one, tile));
    op.compute = logits.scalar_type();
    chunk.logits = logits.to(at::kFloat);
    const at::Tensor columns = chunk.of(of.target).sub(one.first[tile]);
    chunk.hit = columns.ge(0).logical_and_(columns.lt(one.rows(tile))).unsqueeze_(1);
    chunk.columns = columns.clamp_(0, one.rows(tile) - 1).unsqueeze_(1);
    return chunk;
  }

  static at::Tensor ignored(const TileOp& op, const at::Tensor& target, int64_t num_classes) {
    const at::Tensor ignored = target.eq(op.loss.ignore_index);
    const at::Tensor wrong = target.lt(0).logical_or_(target.ge(num_classes));
    TORCH_CHECK_INDEX(!wrong.logical_and_(ignored.logical_not()).any().item<bool>(),
                      "a target is out of bounds: the head has ", num_classes, " classes");
    return ignored;
  }

  static at::Tensor forward(AutogradContext* context, const c10::intrusive_ptr<TileOp>& op,
                            const at::Tensor& input, const at::Tensor& whole,
                            const at::Tensor& target, const MaybeBias& /*its edge*/) {
    const int64_t num_classes = whole.size(0), num_tokens = input.size(0);
    const double smoothing = op->loss.label_smoothing;
    const at::Tensor skip = ignored(*op, target, num_classes);
    at::Tensor log_sum =
        zeros32({num_tokens}, input).fill_(-std::numeric_limits<double>::infinity());
    const at::Tensor picked = zeros32({num_tokens}, input), total = zeros32({num_tokens}, input);
    // Keeps a running log-sum-exp over the tiles (arXiv:1805.02867), so the full logits never
    // exist.
    op->forward([&](const TiledWeight& one, size_t tile, const at::Tensor& weight) {
      for (int64_t begin = 0; begin < num_tokens; begin += op->tokens) {
        const RowChunk part = chunk(*op, one, tile, begin, {input, weight, target});
        const at::Tensor sum = part.of(log_sum);
        sum.copy_(at::logaddexp(sum, at::logsumexp(part.logits, {1})));
        const at::Tensor hits = part.logits.gather(1, part.columns).mul_(part.hit);
        part.of(picked).add_(hits.squeeze(1));
        if (smoothing > 0.0) part.of(total).add_(part.logits.sum(1));
      }
    });
    at::Tensor loss = (log_sum - picked).mul_(1.0 - smoothing);
    if (smoothing > 0.0) loss.add_(log_sum - total / num_classes, smoothing);
    loss.masked_fill_(skip, 0.0);
    if (op->loss.reduction != "none") loss = loss.sum();
    if (op->loss.reduction == "mean") loss.div_(skip.logical_not().sum());
    op->save_in(context);
    context->save_for_backward({input, target, log_sum});
    return loss.to(op->out);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TileOp& op = TileOp::of(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &target = saved[1], &log_sum = saved[2];
    const int64_t num_classes = op.weights()->at(op.index).whole.size(0);
    const at::Tensor skip = target.eq(op.loss.ignore_index);
    at::Tensor scale = gradients[0].to(at::kFloat).expand({input.size(0)});
    if (op.loss.reduction == "mean") scale = scale / skip.logical_not().sum();
    scale = scale.masked_fill(skip, 0.0).unsqueeze_(1);
    const bool wants_input = context->needs_input_grad(0), trains = context->needs_input_grad(1);
    const at::Tensor rows = input.to(op.compute);
    if (op.bias.defined()) op.bias = op.bias.to(op.compute);
    const at::Tensor to_input = wants_input ? zeros32(input.sizes(), input) : at::Tensor();
    const bool wants_bias = op.has_bias && context->needs_input_grad(3);
    const at::Tensor to_bias = wants_bias ? zeros32({num_classes}, input) : at::Tensor();
    // The logits are computed again, one chunk of tokens and one tile at a time.
    op.backward(true, trains, [&](const TiledWeight& one, size_t tile, const at::Tensor& held) {
      const at::Tensor weight = held.to(op.compute);
      const at::Tensor to_weight = trains ? zeros32(weight.sizes(), input) : at::Tensor();
      for (int64_t begin = 0; begin < input.size(0); begin += op.tokens) {
        const RowChunk part = chunk(op, one, tile, begin, {rows, weight, target});
        const at::Tensor outer =
            to_logits(op, part, part.of(log_sum), num_classes).mul_(part.of(scale)).to(op.compute);
        if (wants_input) add_product(part.of(to_input), outer, weight);
        if (trains) add_product(to_weight, outer.t(), part.hidden);
        if (wants_bias) {
          to_bias.narrow(0, one.first[tile], one.rows(tile)).add_(outer.sum(0));
        }
      }
      return to_weight;
    });
    return {at::Tensor(), wants_input ? to_input.to(input.scalar_type()) : to_input, at::Tensor(),
            at::Tensor(), to_bias};
  }

  // Returns the derivative of each token's loss: softmax - (1 - smoothing) onehot - smoothing /
  // classes.
  static at::Tensor to_logits(const TileOp& op, const RowChunk& part, const at::Tensor& log_sum,
                              int64_t num_classes) {
    const double smoothing = op.loss.label_smoothing;
    at::Tensor outer = part.logits.sub(log_sum.unsqueeze(1)).exp_();
    outer.scatter_add_(1, part.columns, part.hit.to(at::kFloat).mul_(smoothing - 1.0));
    if (smoothing > 0.0) outer.sub_(smoothing / static_cast<double>(num_classes));
    return outer;
  }
};

c10::intrusive_ptr<TileOp> make_op(const std::shared_ptr<TiledWeights>& weights, size_t index,
                                   const Bias& bias) {
  auto op = c10::make_intrusive<TileOp>();
  op->owner = weights;
  op->index = index;
  op->has_bias = bias.param.defined();
  if (op->has_bias) op->bias = bias.values.detach();
  return op;
}

}  // namespace

}  // namespace tiles

// ---- the public class

Tiles::Tiles(std::shared_ptr<tiles::TiledWeights> weights, const std::string& param,
             int64_t loss_tokens)
    : weights_(std::move(weights)),
      index_(weights_->index_of(param)),
      loss_tokens_(std::max<int64_t>(1, loss_tokens)) {}

int64_t Tiles::count() const { return static_cast<int64_t>(weights_->at(index_).tiles.size()); }

at::Tensor Tiles::linear(const at::Tensor& input, const Bias& bias) const {
  const auto op = tiles::make_op(weights_, index_, bias);
  return tiles::LinearFunction::apply(op, input, weights_->at(index_).whole, tiles::edge(bias));
}

at::Tensor Tiles::embedding(const at::Tensor& ids, int64_t padding_idx,
                            bool scale_grad_by_freq) const {
  const auto op = tiles::make_op(weights_, index_, {});
  op->padding_idx = padding_idx;
  op->scale_grad_by_freq = scale_grad_by_freq;
  return tiles::TiledEmbeddingFunction::apply(op, ids, weights_->at(index_).whole);
}

at::Tensor Tiles::cross_entropy(const at::Tensor& input, const Bias& bias, const at::Tensor& target,
                                const CrossEntropyOptions& options, at::ScalarType out) const {
  const auto op = tiles::make_op(weights_, index_, bias);
  op->loss = options;
  op->out = out;
  op->tokens = loss_tokens_;
  return tiles::TiledCrossEntropyFunction::apply(op, input, weights_->at(index_).whole, target,
                                                 tiles::edge(bias));
}

}  // namespace penstock
