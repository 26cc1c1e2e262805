#include "src/engine/mesh/sequence_ranks.h"

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/step/core_state.h"
#include "src/parallel/ring_attention.h"
#include "src/parallel/tensor_operators.h"

namespace penstock {

SequenceRanks::SequenceRanks(const Core& core, int num_neighbours) : state_(core.state_) {
  engine::ModelRanks& ranks = state_->model_ranks;
  if (!ranks.sequence) {
    throw ConfigError("[engine::SequenceRanks] \"mesh.sequence\" is 1, so sequences are not cut");
  }
  ranks.sequence->arrange(num_neighbours);
  ranks.record(state_->tiers.recorder);
  ranks.watch_new();
  ranks.set_step(state_->steps + 1);
}

int SequenceRanks::index() const { return state_->model_ranks.sequence->all()->rank(); }
int SequenceRanks::count() const { return state_->model_ranks.sequence->all()->size(); }

at::Tensor SequenceRanks::all_to_all(const at::Tensor& part, int64_t cut_dim,
                                     int64_t join_dim) const {
  state_->check_open("forward");
  static const comm::Label kLabel("tokens for heads");
  return parallel::all_to_all(part, cut_dim, join_dim,
                              {state_->model_ranks.sequence->neighbours(), kLabel});
}

at::Tensor SequenceRanks::ring_attention(const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor& value,
                                         const std::optional<at::Tensor>& attended,
                                         double scale) const {
  state_->check_open("forward");
  static const comm::Label kLabel("keys and values");
  return parallel::ring_attention(query, key, value, attended, scale,
                                  {state_->model_ranks.sequence->ring(), kLabel});
}

at::Tensor SequenceRanks::sum_losses(const at::Tensor& addend) const {
  state_->check_open("forward");
  static const comm::Label kLabel("loss");
  return parallel::sum_losses(addend, {state_->model_ranks.sequence->all(), kLabel});
}

void SequenceRanks::compare(const std::vector<at::Tensor>& inputs,
                            const std::string& others) const {
  state_->check_open("forward");
  const int different = state_->model_ranks.sequence->compare(inputs, others);
  if (different < 0) return;
  throw RuntimeFault(
      concat("[engine::forward] in the group of rank ", state_->group->rank(), ", sequence rank ",
             different, " was given different inputs from sequence rank 0",
             state_->tiers.computes.is_host() ? "" : ", or made different exchanges before",
             ". The ", count(),
             " ranks of a group have parts of the same sequences (mesh.sequence). Choose samples "
             "by engine.data_rank and engine.data_size, not by the rank"));
}

}  // namespace penstock
