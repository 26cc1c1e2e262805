#include <numeric>
#include <vector>

#include "src/engine/watch/observer.h"
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

}  // namespace

std::optional<Core::State::Observer::Prediction> Core::State::Observer::predict() const {
  const Config& config = state.config;
  const int64_t micro_batches = std::max<int64_t>(1, config.batch.accumulate);
  const std::vector<double>& flops = state.monitor->forward_flops;
  const double tokens = state.monitor->tokens_of_rank() / static_cast<double>(micro_batches);
  if (!state.monitor->machine || config.mesh.pipeline > 1) return {};
  if (flops.empty() && tokens == 0.0) return {};
  Plan plan;
  for (const Section section : sections_of(micro_batches)) {
    const Plan one = state.driver->plan({section});
    plan.steps.insert(plan.steps.end(), one.steps.begin(), one.steps.end());
  }
  const exec::Executor& executor = *state.executor;
  const Timeline timeline =
      replay({plan}, executor.table(), state.model, executor.mesh(), *state.monitor->machine,
             flops.empty() ? work_of(state.model, tokens) : work_of_units(state.model, flops));
  Prediction prediction;
  double root_forward = 0.0;
  double* compute = nullptr;  // the last compute line, whose time includes its layers' exchanges
  prediction.step_s = timeline.step;
  const std::vector<exec::PlannedStep> planned = executor.prepare(plan);
  for (size_t line = 0; line < planned.size(); ++line) {
    const Step& step = planned[line].step;
    const double seconds = timeline.ranks.front().lines[line];
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
    prediction.lines[state.driver->text_of(Op::kForward, 0)] =
        root_forward / static_cast<double>(micro_batches);
  }
  return prediction;
}

}  // namespace penstock
