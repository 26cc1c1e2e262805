#pragma once
// The planner: walks a model's units in order and writes the moves that a table requires in each
// phase. Pure functions of (table, model, mesh), so every rank computes the same plan.
#include <cstdint>

#include "src/plan/plan.h"

namespace penstock {

// Sections of a training step. The engine runs them one at a time, because eager code decides the
// number of micro-batches as it runs. plan_step() concatenates them.
enum class Section : uint8_t {
  kForward,       // the window's first training forward: parameters end in `hold`
  kForwardNext,   // a later forward: parameters start and end in `hold`
  kEval,          // a forward without backward: parameters end in `rest`
  kBackward,      // not the last backward of the window: everything ends in `hold`
  kBackwardLast,  // the last backward of the window: gradients end in `update`
  kUpdate,        // gradients are in `update`
  kUpdateEarly,   // the window ended early: gradients are still in `hold`
};
const char* section_name(Section section);
// Returns whether the section is a training forward or backward. In a pipeline, the plans of the
// window's actions replace these sections.
inline bool is_pass(Section section) {
  return section != Section::kEval && section != Section::kUpdate &&
         section != Section::kUpdateEarly;
}

Plan plan_section(const Table& table, const ModelDesc& model, const Mesh& mesh, Section section);

// Plans one training step of `num_micro` micro-batches, with `micro` lines.
Plan plan_step(const Table& table, const ModelDesc& model, const Mesh& mesh, int num_micro);

}  // namespace penstock
