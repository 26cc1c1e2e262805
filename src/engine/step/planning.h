#pragma once
// Planning: makes the plans of a core's sections. New plans follow when the order of the units is
// known, when step one has shown what layers exchange, and when the next step has other wires
// (comm.exact_first, comm.exact_every). Used by the same threads as Core::State.
#include <string>

#include "src/engine/step/core_state.h"
#include "src/plan/pipeline_plan.h"

namespace penstock {

struct Core::State::Planning {
  // Plans step `steps + 1`. No section may be running.
  void make() const;
  // Returns the section's plan, with the table's wires even if step `steps + 1` is exact.
  Plan plan(Section section) const;
  // Begins a window of a pipeline. Plans its actions again if they differ from the last window's.
  void begin_window(const Schedule& schedule, bool trains) const;
  // Returns the PlanName::action of a section that begins.
  int action_of(Section section) const;
  // Returns this rank's plan of a pipeline's window of `batch.accumulate` micro-batches. Throws
  // ConfigError if the schedule does not allow this number.
  Plan window(const Table& table, const ModelDesc& model) const;
  // Returns the text of window(), with the table's wires. If the schedule does not allow the
  // number, returns the reason as a comment line.
  std::string window_text() const;
  // Between steps: makes new plans if step `steps + 1` has other wires than the plans.
  void follow_wires() const;

  // Layers are about to exchange something with tensor or sequence ranks. Exchanges outside of
  // training are ignored.
  void add_exchange(const LayerExchange& made, const comm::Label& label) const;
  // [ranks of the stage] Counts a step that ended. After step one, adds what layers exchanged to
  // the plans. Earlier, a stage of this rank may not have had a backward yet.
  void begin_next_step() const;
  // Returns a collective among the ranks of this stage only, because other stages are at other
  // places in the schedule.
  engine::OrderLearner::ShareText share_in_stage() const;

  State& state;

 private:
  // Returns the plans of the actions of a schedule. `table` has the wires of the step.
  StagePlan plan_actions(const Table& table, const ModelDesc& model,
                         const Schedule& schedule) const;
  void make_actions() const;
};

}  // namespace penstock
