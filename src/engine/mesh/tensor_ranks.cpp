#include "src/engine/mesh/tensor_ranks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/step/core_state.h"
#include "src/parallel/tensor_operators.h"

namespace penstock {

TensorRanks::TensorRanks(const Core& core) : state_(core.state_) {
  if (state_->model_ranks.tensor) return;
  throw ConfigError("[engine::TensorRanks] \"mesh.tensor\" is 1, so nothing is cut");
}

int TensorRanks::index() const { return state_->model_ranks.tensor->peers().rank(); }
int TensorRanks::count() const { return state_->model_ranks.tensor->peers().size(); }
const std::vector<TensorModule>& TensorRanks::modules() const {
  return state_->model_ranks.tensor->modules();
}

namespace {

// Returns the rows of the key or value head that this rank's queries attend to.
at::Tensor head_of(const at::Tensor& rows, int64_t heads, const parallel::Peers& peers) {
  const int64_t each = rows.size(0) / heads, head = peers.rank() * heads / peers.size();
  return rows.narrow(0, head * each, each);
}

}  // namespace

at::Tensor TensorRanks::linear(const TensorModule& how, const at::Tensor& input,
                               const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias) const {
  state_->check_open("forward");
  const parallel::OperatorPeers peers = state_->model_ranks.tensor->ranks_of(how);
  const at::Tensor rows = how.transposed ? weight.t() : weight;
  // The row styles sum partial outputs over the ranks, because the input is cut like the weight's
  // columns.
  if (how.style == "row") return parallel::row_linear(input, rows, bias, peers);
  if (how.style == "row_tokens") return parallel::row_linear_tokens(input, rows, bias, peers);
  if (how.style == "row_cut") {
    return parallel::row_linear(parallel::cut(input, -1, peers), rows, bias, peers);
  }
  // The other styles cut the output. The gradient of the replicated input is summed over the ranks.
  const at::Tensor replicated =
      how.gathered ? input : state_->model_ranks.tensor->replicated.of(input, peers);
  if (how.style == "shared") {
    std::optional<at::Tensor> own;
    if (bias) own = head_of(*bias, how.heads, *peers);
    return at::linear(replicated, head_of(rows, how.heads, *peers), own);
  }
  const at::Tensor output = at::linear(replicated, rows, bias);
  if (how.style == "column") return output;
  return parallel::gather_whole(output, -1, how.size, peers);
}

at::Tensor TensorRanks::cut_logits(const TensorModule& how, const at::Tensor& input,
                                   const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias) const {
  TensorModule column = how;
  column.style = "column";
  return linear(column, input, weight, bias);
}

at::Tensor TensorRanks::whole_logits(const TensorModule& how, const at::Tensor& logits) const {
  state_->check_open("forward");
  return parallel::gather_whole(logits, -1, how.size, state_->model_ranks.tensor->ranks_of(how));
}

at::Tensor TensorRanks::cross_entropy(const TensorModule& how, const at::Tensor& logits,
                                      const at::Tensor& target,
                                      const CrossEntropyOptions& options) const {
  state_->check_open("forward");
  if (options.reduction == "none") {
    throw ConfigError(
        "[engine::TensorRanks] the cross-entropy of cut logits cannot have the reduction \"none\". "
        "Use \"mean\" or \"sum\"");
  }
  return parallel::cross_entropy(
      logits, target, how.size,
      {options.ignore_index, options.label_smoothing, options.reduction == "mean"},
      state_->model_ranks.tensor->ranks_of(how));
}

at::Tensor TensorRanks::cut_tokens(const at::Tensor& whole) const {
  state_->check_open("forward");
  return parallel::cut(whole, parallel::kTokens, state_->model_ranks.tensor->all("cut tokens"));
}

at::Tensor TensorRanks::whole_tokens(const at::Tensor& part) const {
  state_->check_open("forward");
  return parallel::gather_whole(part, parallel::kTokens, part.size(parallel::kTokens) * count(),
                                state_->model_ranks.tensor->all("whole tokens"));
}

at::Tensor TensorRanks::gather_tokens(const std::string& name, const at::Tensor& part) const {
  state_->check_open("forward");
  return parallel::gather(part, parallel::kTokens,
                          state_->model_ranks.tensor->all(concat("gather_tokens (", name, ")")));
}

at::Tensor TensorRanks::embedding(const TensorModule& how, const at::Tensor& ids,
                                  const at::Tensor& weight, int64_t padding_idx) const {
  state_->check_open("forward");
  const parallel::OperatorPeers peers = state_->model_ranks.tensor->ranks_of(how);
  if (how.style == "vocab") {
    return parallel::embedding(ids, weight, how.size, padding_idx, peers);
  }
  const at::Tensor output = at::embedding(weight, ids, padding_idx);
  if (how.style == "column") return output;
  return parallel::gather_whole(output, -1, how.size, peers);
}

bool TensorRanks::compare(const std::vector<at::Tensor>& inputs, const std::string& others,
                          const std::string& draws) const {
  state_->check_open("forward");
  const auto [different, alike] =
      state_->model_ranks.tensor->peers().compare(inputs, others, draws);
  if (different < 0) return alike;
  const int first = state_->group->rank() - index();
  throw RuntimeFault(concat(
      "[engine::forward] ranks ", first, " and ", first + different,
      " compute one model together (mesh.tensor ", count(), ") but were given different inputs",
      state_->tiers.computes.is_host() ? "" : ", or made different exchanges before",
      ". Choose samples by engine.data_rank and "
      "engine.data_size, not by the rank"));
}

void TensorRanks::set_checking(bool checks) const { state_->exchanges->ignore(checks); }

const std::map<std::string, Cut>& TensorRanks::cuts() const {
  return state_->model_ranks.tensor->cuts();
}

at::Tensor TensorRanks::all_of(const std::string& what, const at::Tensor& values) const {
  state_->check_open("forward");
  const at::NoGradGuard no_grad;
  const parallel::OperatorPeers peers = state_->model_ranks.tensor->all(what);
  return peers->gather(values.detach().unsqueeze(0), 0, -1, peers.label);
}

}  // namespace penstock
