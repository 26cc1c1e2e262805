#include "src/engine/step/planning.h"

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/model/residual_state.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

// Returns the wires of step `step`: the table's, or plain ones in an exact step. The next step's
// forward uses the published parameters, so that step determines their wire.
TableWires wires_of(const Config& config, const Table& table, int64_t step) {
  TableWires wires = is_exact_step(config.comm, step) ? TableWires() : table.wires;
  wires.publish = is_exact_step(config.comm, step + 1) ? Wires() : table.wires.publish;
  return wires;
}

}  // namespace

Plan Core::State::Planning::plan(Section section) const {
  const exec::Executor& executor = *state.executor;
  const Table& table = executor.table();
  if (table.wires == state.planned_wires) return state.driver->plan({section});
  return with_passes(plan_section(table, state.model, executor.mesh(), section), state.model,
                     state.config);
}

void Core::State::Planning::make() const {
  exec::Executor& executor = *state.executor;
  state.activation_memory->put_into(state.model);
  Table table = executor.table();
  table.wires = wires_of(state.config, table, state.steps + 1);
  executor.params().use(table.wires.param);
  for (const Section section : kSections) {
    const Plan plan = plan_section(table, state.model, executor.mesh(), section);
    state.driver->set_plan({section}, with_passes(plan, state.model, state.config));
  }
  state.planned_wires = table.wires;
  make_actions();
  state.rules = {sums_signs(table, executor.mesh()), engine::residual_divisor(state.config)};
}

StagePlan Core::State::Planning::plan_actions(const Table& table, const ModelDesc& model,
                                              const Schedule& schedule) const {
  const engine::StageWindow& window = *state.model_ranks.window;
  StagePlan plan = plan_stages(table, window.by_stage(model, state.order->spanning()),
                               state.executor->mesh(), schedule, window.index());
  for (Plan& action : plan.actions) action = with_passes(action, model, state.config);
  plan.update = with_passes(plan.update, model, state.config);
  return plan;
}

// Plans the actions of windows like the last one, and the forwards of evaluations.
void Core::State::Planning::make_actions() const {
  if (!state.model_ranks.window) return;
  const engine::StageWindow& window = *state.model_ranks.window;
  const exec::Executor& executor = *state.executor;
  Table table = executor.table();
  table.wires = state.planned_wires;
  const ModelDesc model = window.by_stage(state.model, state.order->spanning());
  for (const int stage : window.stages()) {
    const Plan plan = plan_section(table, of_stage(model, stage), executor.mesh(), Section::kEval);
    state.driver->set_plan({Section::kEval, stage}, with_passes(plan, state.model, state.config));
  }
  if (window.trained().ranks.empty()) return;
  const StagePlan plan = plan_actions(table, state.model, window.trained());
  const std::vector<Action>& actions = window.trained().ranks[static_cast<size_t>(window.index())];
  for (size_t i = 0; i < actions.size(); ++i) {
    const Section section = actions[i].forward ? Section::kForward : Section::kBackward;
    state.driver->set_plan({section, static_cast<int>(i)}, plan.actions[i]);
  }
}

void Core::State::Planning::begin_window(const Schedule& schedule, bool trains) const {
  if (state.model_ranks.window->begin(schedule, trains)) make_actions();
}

int Core::State::Planning::action_of(Section section) const {
  if (!state.model_ranks.window) return engine::kNoAction;
  const bool forward = section == Section::kForward || section == Section::kEval;
  const auto turn = state.model_ranks.window->now(forward);
  if (!turn) return engine::kNoAction;
  if (section == Section::kEval) return turn->stage;
  return turn->trains ? turn->number : engine::kNoAction;
}

Plan Core::State::Planning::window(const Table& table, const ModelDesc& model) const {
  const auto num_micro = static_cast<int>(state.config.batch.accumulate);
  const Schedule schedule = state.model_ranks.window->schedule(num_micro, true);
  return plan_actions(table, model, schedule).joined();
}

std::string Core::State::Planning::window_text() const {
  try {
    return window(state.executor->table(), state.model).text();
  } catch (const ConfigError& error) {  // train_batch() will throw it
    return concat("# ", error.what(), "\n");
  }
}

void Core::State::Planning::add_exchange(const LayerExchange& made,
                                         const comm::Label& label) const {
  const std::optional<Section> section = state.driver->section();
  const bool forward = section == Section::kForward || section == Section::kForwardNext;
  const bool backward = section == Section::kBackward || section == Section::kBackwardLast;
  const bool back = engine::in_backward();
  if (!(back ? backward : forward)) return;
  state.exchanges->add(back ? Op::kBackward : Op::kForward, label, state.driver->computing(), made);
}

void Core::State::Planning::begin_next_step() const {
  ++state.steps;
  state.activation_memory->end_step();
  state.activation_memory->put_into(state.model);
  if (state.model_ranks.stages) {
    state.model.boundary_bytes = state.model_ranks.stages->message_bytes();
  }
  if (!state.exchanges || !state.exchanges->recording() || !state.order->done()) return;
  state.exchanges->agree(share_in_stage());
  state.exchanges->put_into(state.model);
  state.executor->updates().finish(false);  // a late update still runs lines of the old plan
  make();
}

engine::OrderLearner::ShareText Core::State::Planning::share_in_stage() const {
  return [&executor = *state.executor](const std::string& label, const std::string& text) {
    return engine::share_text(label, text, [&](const std::string& name, const std::string& part) {
      return executor.share(name, part, true);
    });
  };
}

void Core::State::Planning::follow_wires() const {
  const Table& table = state.executor->table();
  if (wires_of(state.config, table, state.steps + 1) == state.planned_wires) return;
  state.executor->updates().finish(false);  // a late update still runs lines of the old plan
  make();
}

}  // namespace penstock
