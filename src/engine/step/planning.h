#pragma once
// Planning: makes the plans of a core's sections. New plans follow when the order of the units is
// known, when step one has shown what layers exchange, and when the next step has other wires
// (comm.exact_first, comm.exact_every). Used like Core::State.
#include "src/engine/step/core_state.h"

namespace penstock {

struct Core::State::Planning {
  // Plans step `steps + 1`. No section may be running.
  void make() const;
  // Returns the section's plan, with the table's wires also if step `steps + 1` is exact.
  Plan plan(Section section) const;
  // Between steps: makes new plans if step `steps + 1` has other wires than the plans.
  void follow_wires() const;

  // Layers are about to exchange something with tensor or sequence ranks. Exchanges outside of
  // training are ignored.
  void add_exchange(const LayerExchange& made, const comm::Label& label) const;
  // [ranks of the stage] Counts a step that ended. After step one, plans what layers exchanged:
  // only then has each stage of a rank had a backward.
  void begin_next_step() const;
  // Returns a collective among the ranks of this stage. Other stages are at other places in the
  // schedule.
  engine::OrderLearner::ShareText share_in_stage() const;

  State& state;
};

}  // namespace penstock
