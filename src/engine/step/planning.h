#pragma once
// Planning: makes the plans of a core's sections. New plans follow when the order of the units is
// known, and when the next step has other wires (comm.exact_first, comm.exact_every). Used like
// Core::State.
#include "src/engine/step/core_state.h"

namespace penstock {

struct Core::State::Planning {
  // Plans step `steps + 1`. No section may be running.
  void make() const;
  // Returns the section's plan, with the table's wires also if step `steps + 1` is exact.
  Plan plan(Section section) const;
  // Between steps: makes new plans if step `steps + 1` has other wires than the plans.
  void follow_wires() const;

  State& state;
};

}  // namespace penstock
