#pragma once
// The planner: walks a model's order under a table and writes the moves that each phase needs.
// Pure functions of (table, model, mesh): every rank computes the same plan.
#include <cstdint>

#include "src/plan/plan.h"

namespace penstock {

// The sections a training step consists of. The engine drives them one at a time, since eager code
// decides how many micro-batches there are; plan_step() is their concatenation.
enum class Section : uint8_t {
  kForward,       // the window's first training forward: parameters end in `hold`
  kForwardNext,   // a later one: they begin there, too
  kEval,          // a forward without backward: parameters end in `rest`
  kBackward,      // a backward after which more follow in the window: all ends in `hold`
  kBackwardLast,  // the last backward of the window: gradients end in `update`
  kUpdate,        // gradients are in `update`
  kUpdateEarly,   // the window was closed early: gradients are still in `hold`
};
const char* section_name(Section section);

Plan plan_section(const Table& table, const ModelDesc& model, const Mesh& mesh, Section section);

// One training step of `num_micro` micro-batches, with `micro` lines.
Plan plan_step(const Table& table, const ModelDesc& model, const Mesh& mesh, int num_micro);

}  // namespace penstock
