#include "src/engine/step/planning.h"

#include "src/engine/model/residual_state.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

// Returns the wires of step `step`: the table's, or plain ones in an exact step. Its updated
// parameters are those of the next step's forward.
TableWires wires_of(const Config& config, const Table& table, int64_t step) {
  TableWires wires = is_exact_step(config.comm, step) ? TableWires() : table.wires;
  wires.publish = is_exact_step(config.comm, step + 1) ? Wires() : table.wires.publish;
  return wires;
}

}  // namespace

Plan Core::State::Planning::plan(Section section) const {
  const exec::Executor& executor = *state.executor;
  const Table& table = executor.table();
  if (table.wires == state.planned_wires) return state.driver->plan(section);
  return with_passes(plan_section(table, state.model, executor.mesh(), section), state.model,
                     state.config);
}

void Core::State::Planning::make() const {
  exec::Executor& executor = *state.executor;
  Table table = executor.table();
  table.wires = wires_of(state.config, table, state.steps + 1);
  executor.params().use(table.wires.param);
  for (const Section section : kSections) {
    const Plan plan = plan_section(table, state.model, executor.mesh(), section);
    state.driver->set_plan(section, with_passes(plan, state.model, state.config));
  }
  state.planned_wires = table.wires;
  state.rules = {sums_signs(table, executor.mesh()), engine::residual_divisor(state.config)};
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
  if (!state.exchanges || !state.exchanges->recording() || !state.order->done()) return;
  state.exchanges->agree(share_in_stage());
  state.exchanges->put_into(state.model);
  state.executor->updates().finish();  // a late update still runs lines of the old plan
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
  state.executor->updates().finish();  // a late update still runs lines of the old plan
  make();
}

}  // namespace penstock
