#pragma once
// StageBackward: runs the two parts of a pipeline stage's split backward ([Note: Zero bubble]).
// Used only by the model's thread, or by autograd's thread while a backward runs.
#include "src/engine/step/core_state.h"
#include "src/engine/step/split_backward.h"

namespace penstock {

struct Core::State::StageBackward {
  // Runs the first part. It is a section of its own and no backward of the window.
  void inputs(engine::SplitBackward& split) const;
  // Runs the second part, which is a backward of the window.
  void weights(engine::SplitBackward& split) const;
  // The first part has reached a unit: see State::backward_enter().
  void enter(int unit, const engine::GraphPlace& since, const engine::GraphPlace& at) const;

  State& state;
};

}  // namespace penstock
