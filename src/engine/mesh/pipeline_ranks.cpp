#include "penstock/pipeline_ranks.h"

#include <utility>

#include "penstock/error.h"
#include "src/engine/step/core_state.h"

namespace penstock {

PipelineRanks::PipelineRanks(const Core& core) : state_(core.state_) {
  if (state_->together.stages) return;
  throw ConfigError("[engine::PipelineRanks] \"mesh.pipeline\" is 1: there is one stage");
}

int PipelineRanks::index() const { return state_->together.stages->index(); }
int PipelineRanks::count() const { return state_->together.stages->count(); }
int PipelineRanks::num_stages() const { return state_->together.stages->num_stages(); }
const std::vector<StagePiece>& PipelineRanks::pieces() const {
  return state_->together.stages->pieces();
}

std::vector<StageAction> PipelineRanks::begin(int num_micro, bool trains) {
  state_->check_open("train_batch");
  std::vector<StageAction> actions;
  for (const Action& one : state_->together.stages->begin(num_micro, trains)) {
    actions.push_back({one.stage, one.forward, one.micro});
  }
  return actions;
}

StageMessage PipelineRanks::receive(const StageAction& action) {
  parallel::Message message =
      state_->together.stages->receive({action.stage, action.forward, action.micro});
  return {std::move(message.text), std::move(message.tensors)};
}

void PipelineRanks::send(const StageAction& action, const StageMessage& made) {
  state_->together.stages->send({action.stage, action.forward, action.micro},
                                {made.text, made.tensors});
}

void PipelineRanks::end_backward() { state_->end_backward_of_stage(); }

void PipelineRanks::set_buffers(std::vector<StageBuffer> buffers) {
  state_->together.stages->set_buffers(std::move(buffers));
}

void PipelineRanks::bring_buffers() {
  state_->check_open("bring_buffers");
  state_->together.stages->bring_buffers([this](const auto& label, const auto& payload) {
    return state_->executor->share(label, payload);
  });
}

void PipelineRanks::end() { state_->together.stages->end(); }

}  // namespace penstock
