#include "src/engine/mesh/stage_window.h"

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

bool contains(const std::vector<int>& all, int one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

}  // namespace

StageWindow::StageWindow(const Members& members, const Stages& stages,
                         const std::vector<UnitSpec>& specs, const ParallelConfig& config)
    : index_(members.index),
      num_ranks_(members.size()),
      virtual_stages_(config.virtual_stages),
      schedule_(config.schedule) {
  for (int stage = index_; stage < stages.count; stage += num_ranks_) own_.push_back(stage);
  for (const UnitSpec& spec : specs) {
    std::vector<int>& visitors = stages_of_.emplace_back();
    for (const int stage : own_) {
      const bool visits = std::any_of(spec.params.begin(), spec.params.end(), [&](int param) {
        return contains(stages.of_param[static_cast<size_t>(param)], stage);
      });
      if (visits) visitors.push_back(stage);
    }
  }
}

Schedule StageWindow::schedule(int num_micro, bool trains) const {
  const PipelineShape shape{num_ranks_, virtual_stages_, num_micro};
  Schedule schedule = make_schedule(trains ? schedule_ : "gpipe", shape);
  for (std::vector<Action>& actions : schedule.ranks) {
    if (!trains) std::erase_if(actions, [](const Action& action) { return !action.forward; });
  }
  return schedule;
}

ModelDesc StageWindow::by_stage(ModelDesc model, const std::vector<int>& spanning) const {
  for (std::vector<Visit>* order : {&model.forward, &model.backward}) {
    const std::vector<Visit> visits = std::exchange(*order, {});
    for (const int stage : own_) {
      for (Visit visit : visits) {
        const int unit = visit.unit;
        if (unit > 0 && !contains(spanning, unit) && !contains(stages_of_[unit], stage)) continue;
        visit.stage = stage;
        order->push_back(visit);
      }
    }
  }
  return model;
}

bool StageWindow::begin(const Schedule& schedule, bool trains) {
  actions_ = schedule.ranks[static_cast<size_t>(index_)];
  splits_.clear();
  begun_ = 0;
  trains_ = trains;
  if (!trains || schedule == trained_) return false;
  trained_ = schedule;
  return true;
}

void StageWindow::start(const Action& action) {
  if (begun_ < actions_.size() && actions_[begun_] == action) {
    ++begun_;
    return;
  }
  throw RuntimeFault(concat("[engine::stages] action ", action.text(),
                            " began out of turn: the window's next action is ",
                            begun_ < actions_.size() ? actions_[begun_].text() : "none"));
}

void StageWindow::keep(const Action& inputs, SplitBackward split) {
  splits_.emplace(std::pair(inputs.stage, inputs.micro), std::move(split));
}

SplitBackward StageWindow::take(const Action& weights) {
  const auto found = splits_.find({weights.stage, weights.micro});
  PENSTOCK_ASSERT(found != splits_.end(), concat(weights.text(), " before its inputs"));
  SplitBackward split = std::move(found->second);
  splits_.erase(found);
  return split;
}

std::optional<StageWindow::StageTurn> StageWindow::now(bool forward) const {
  if (begun_ == 0 || begun_ > actions_.size()) return {};
  const Action& action = actions_[begun_ - 1];
  if (action.forward != forward) return {};
  return StageTurn{static_cast<int>(begun_) - 1, action.stage, trains_};
}

bool StageWindow::only_inputs() const {
  return begun_ > 0 && begun_ <= actions_.size() &&
         actions_[begun_ - 1].part == BackwardPart::kInputs;
}

bool StageWindow::computes(int unit) const {
  if (unit == 0 || begun_ == 0 || begun_ > actions_.size()) return true;
  return contains(stages_of_[static_cast<size_t>(unit)], actions_[begun_ - 1].stage);
}

}  // namespace penstock::engine
