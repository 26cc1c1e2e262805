#include "src/engine/mesh/pipeline_ranks.h"

#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/step/backward_end.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/planning.h"
#include "src/engine/step/stage_backward.h"

namespace penstock {

PipelineRanks::PipelineRanks(const Core& core) : state_(core.state_) {
  if (state_->model_ranks.stages) return;
  throw ConfigError("[engine::PipelineRanks] \"mesh.pipeline\" is 1, so there is only one stage");
}

int PipelineRanks::index() const { return state_->model_ranks.stages->index(); }
int PipelineRanks::count() const { return state_->model_ranks.stages->count(); }
int PipelineRanks::num_stages() const { return state_->model_ranks.stages->num_stages(); }
const std::vector<StagePiece>& PipelineRanks::pieces() const {
  return state_->model_ranks.stages->pieces();
}

std::vector<Action> PipelineRanks::begin(int num_micro, bool trains) {
  state_->check_open("train_batch");
  const Schedule schedule = state_->model_ranks.window->schedule(num_micro, trains);
  state_->model_ranks.stages->begin(schedule);
  if (trains && state_->window->seen() > 0 && !state_->window->armed()) {
    const int64_t seen = state_->window->seen();
    throw RuntimeFault(
        concat("[front::train_batch] the last window was not applied, because only ", seen,
               " of this rank's ", state_->window->accumulate(),
               " backwards reached a trainable parameter (here or on another rank). Before "
               "train_batch(), call zero_grad(), or call step(True) to average over the ",
               seen, " backwards"));
  }
  Core::State::Planning{*state_}.begin_window(schedule, trains);
  return schedule.ranks[static_cast<size_t>(index())];
}

void PipelineRanks::start(const Action& action) { state_->model_ranks.window->start(action); }

StageMessage PipelineRanks::receive(const Action& action) {
  parallel::TensorMessage message = state_->model_ranks.stages->receive(action);
  return {std::move(message.text), std::move(message.tensors)};
}

void PipelineRanks::send(const Action& action, const StageMessage& made) {
  state_->model_ranks.stages->send(action, {made.text, made.tensors});
}

void PipelineRanks::backward_inputs(const Action& action, StageGraph graph) {
  auto& [outputs, gradients, inputs] = graph;
  engine::SplitBackward split(std::move(outputs), std::move(gradients), std::move(inputs));
  Core::State::StageBackward{*state_}.inputs(split);
  state_->model_ranks.window->keep(action, std::move(split));
}

void PipelineRanks::backward_weights(const Action& action) {
  engine::SplitBackward split = state_->model_ranks.window->take(action);
  Core::State::StageBackward{*state_}.weights(split);
}

void PipelineRanks::end_backward(const Action& action) {
  Core::State::BackwardEnd{*state_}.of_stage(action.micro);
}

StageMessage PipelineRanks::share_outputs(const StageMessage& own) {
  auto shared = state_->model_ranks.stages->share_outputs({own.text, own.tensors});
  return {std::move(shared.text), std::move(shared.tensors)};
}

void PipelineRanks::set_buffers(std::vector<StageBuffer> buffers) {
  state_->model_ranks.stages->set_buffers(std::move(buffers));
}

void PipelineRanks::bring_buffers() {
  state_->check_open("bring_buffers");
  state_->model_ranks.stages->bring_buffers([this](const auto& label, const auto& payload) {
    return state_->executor->share(label, payload);
  });
}

void PipelineRanks::end() {
  state_->model_ranks.stages->end();
  state_->model_ranks.window->end();
}

}  // namespace penstock
