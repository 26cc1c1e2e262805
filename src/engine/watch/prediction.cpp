#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "src/engine/step/planning.h"
#include "src/engine/step/window_agreement.h"
#include "src/engine/watch/observer.h"
#include "src/place/groups.h"
#include "src/plan/cost/pipeline_timeline.h"
#include "src/plan/step_queries.h"

namespace penstock {

namespace {

// Returns the sections of one window, in the order in which the driver runs them.
std::vector<Section> sections_of(int64_t micro_batches) {
  std::vector<Section> sections;
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    sections.push_back(micro == 0 ? Section::kForward : Section::kForwardNext);
    sections.push_back(micro + 1 < micro_batches ? Section::kBackward : Section::kBackwardLast);
  }
  sections.push_back(Section::kUpdate);
  return sections;
}

// Returns the work of each unit from the measured FLOPs of a forward. If units have no events, all
// FLOPs were counted in the root and are distributed in proportion to the units' parameters. A
// backward of a trainable unit takes twice the work of its forward.
std::vector<UnitWork> work_of_units(const ModelDesc& model, std::vector<double> flops) {
  const double total = std::accumulate(flops.begin(), flops.end(), 0.0);
  flops.resize(model.units.size(), 0.0);
  const std::vector<UnitWork> by_params = work_of(model, 1.0);
  if (flops.front() == total) {
    double all = 0.0;
    for (const UnitWork& unit : by_params) all += unit.forward.flops;
    for (size_t unit = 0; unit < flops.size(); ++unit) {
      flops[unit] = all > 0.0 ? total * by_params[unit].forward.flops / all : 0.0;
    }
  }
  std::vector<UnitWork> work;
  for (size_t unit = 0; unit < flops.size(); ++unit) {
    const UnitWork& share = by_params[unit];
    const double backward =
        share.forward.flops > 0.0 ? share.backward.flops / share.forward.flops : 2.0;
    work.push_back({{flops[unit]}, {backward * flops[unit]}});
  }
  return work;
}

// Several stages of a rank may visit a unit (the root). Each visit has a part of the unit's work.
void split_visits(const ModelDesc& model, std::vector<UnitWork>& work) {
  std::vector<int> visits(work.size(), 0);
  for (const Visit& visit : model.forward) {
    if (visit.mark != Mark::kBegin) ++visits[static_cast<size_t>(visit.unit)];
  }
  for (size_t unit = 0; unit < work.size(); ++unit) {
    const int parts = std::max(1, visits[unit]);
    work[unit].forward.flops /= parts;
    work[unit].backward.flops /= parts;
  }
}

}  // namespace

std::optional<TimedPlan> Core::State::Observer::own_times() const {
  const int64_t micro_batches = std::max<int64_t>(1, state.config.batch.accumulate);
  const std::vector<double>& flops = state.monitor->forward_flops;
  const double tokens = state.monitor->tokens_of_rank() / static_cast<double>(micro_batches);
  if (flops.empty() && tokens == 0.0) return {};
  Plan plan;
  if (state.model_ranks.window) {
    plan = Planning{state}.window(state.executor->table(), state.model);
  } else {
    for (const Section section : sections_of(micro_batches)) {
      const Plan one = state.driver->plan({section});
      plan.steps.insert(plan.steps.end(), one.steps.begin(), one.steps.end());
    }
  }
  Machine machine = *state.monitor->machine;
  // Stages on one machine do not cross nodes.
  if (state.group->transport() == "shm") machine.node = machine.local;
  std::vector<UnitWork> work =
      flops.empty() ? work_of(state.model, tokens) : work_of_units(state.model, flops);
  if (state.model_ranks.window) {
    split_visits(state.model_ranks.window->by_stage(state.model, state.order->spanning()), work);
  }
  const exec::Executor& executor = *state.executor;
  return timed(plan, executor.table(), state.model, executor.mesh(), machine, work);
}

void Core::State::Observer::share_times() {
  if (!state.model_ranks.window || !state.monitor->machine) return;
  const std::optional<TimedPlan> own = own_times();
  const std::vector<std::string> all =
      engine::share_text(*state.executor, "times of plan lines", own ? own->text() : "");
  const Groups groups(state.executor->mesh(), state.group->rank());
  state.monitor->stage_times.clear();
  for (const int rank : groups.pipeline().ranks) {
    state.monitor->stage_times.push_back(all[static_cast<size_t>(rank)]);
  }
}

std::optional<Core::State::Observer::Prediction> Core::State::Observer::predict() const {
  if (!state.monitor->machine) return {};
  std::vector<TimedPlan> ranks;
  size_t self = 0;
  if (state.model_ranks.window) {
    for (const std::string& text : state.monitor->stage_times) {
      if (text.empty()) return {};
      ranks.push_back(parse_timed_plan(text));
    }
    self = static_cast<size_t>(state.model_ranks.window->index());
  } else if (std::optional<TimedPlan> own = own_times()) {
    ranks.push_back(std::move(*own));
  }
  if (ranks.empty()) return {};
  const Timeline timeline = replay(ranks, state.monitor->machine->overlap);
  Plan plan;
  for (const TimedLine& line : ranks[self].lines) plan.steps.push_back(line.step);
  Prediction prediction;
  double root_forward = 0.0;
  double* compute = nullptr;  // the last compute line, whose time includes its layers' exchanges
  prediction.step_s = timeline.step;
  const std::vector<exec::PlannedStep> planned = state.executor->prepare(plan);
  for (size_t line = 0; line < planned.size(); ++line) {
    const Step& step = planned[line].step;
    const double seconds = timeline.ranks[self].lines[line];
    if (step.mark == Mark::kBegin || step.mark == Mark::kUse) continue;
    if (is_layer_exchange(step)) {
      if (compute != nullptr) *compute += seconds;
      continue;
    }
    if (step.op == Op::kForward && !state.unit_events) {  // only the root has a compute event
      root_forward += seconds;
      compute = &root_forward;
      continue;
    }
    double& predicted =
        prediction.lines[step.is_compute() ? state.driver->text_of(step.op, step.units.front())
                                           : *planned[line].label.text];
    predicted = seconds;
    if (step.is_compute()) compute = &predicted;
  }
  if (!state.unit_events) {
    const int64_t num_forwards =
        std::max<int64_t>(1, state.config.batch.accumulate) * state.config.parallel.virtual_stages;
    prediction.lines[state.driver->text_of(Op::kForward, 0)] =
        root_forward / static_cast<double>(num_forwards);
  }
  return prediction;
}

}  // namespace penstock
