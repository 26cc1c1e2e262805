#include "src/plan/planner.h"

#include <array>
#include <iterator>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/step_writer.h"

namespace penstock {

namespace {

// Writes one section. The engine runs sections one at a time, so each starts from the placements
// that the sections before it leave.
class SectionWriter : StepWriter {
 public:
  SectionWriter(const Table& table, const ModelDesc& model, const Mesh& mesh, Section section)
      : StepWriter(table, model, mesh), section_(section) {}

  Plan write() && {
    switch (section_) {
      case Section::kForward:
        forward(Phase::kRest, Phase::kHold);
        break;
      case Section::kForwardNext:
        forward(Phase::kHold, Phase::kHold);
        break;
      case Section::kEval:
        forward(Phase::kRest, Phase::kRest);
        break;
      case Section::kBackward:
      case Section::kBackwardLast:
        backward();
        break;
      case Section::kUpdateEarly:
        for (int unit = num_units() - 1; unit >= 0 && !table_.grads_wait_on_disk(); --unit) {
          move_grad(unit, Phase::kHold, Phase::kUpdate);
        }
        [[fallthrough]];
      case Section::kUpdate:
        // This runs once per window, when the gradients of all backwards and all stages exist.
        for (int unit = num_units() - 1; unit >= 0 && !table_.grads_wait_on_disk(); --unit) {
          for (const Axis axis : kModelAxes) sum_addends(unit, axis);
        }
        update();
        break;
    }
    return std::move(plan_);
  }

 private:
  void forward(Phase before, Phase after) {
    begin_params(before);
    for (const auto& [unit, mark, stage] : model_.forward) {
      settle_param(unit, Phase::kForward);
      put({.op = Op::kForward, .units = {unit}, .mark = mark});
      if (mark == Mark::kBegin) continue;
      exchange(unit, model_.units[unit].in_forward);
      if (section_ != Section::kEval) move_inputs(unit, Phase::kForward, Phase::kHold);
      settle_param(unit, after);
    }
  }

  void backward() {
    const bool last = section_ == Section::kBackwardLast;
    begin_params(Phase::kHold);
    std::vector<size_t> last_visit(model_.units.size(), 0);
    for (size_t i = 0; i < model_.backward.size(); ++i) last_visit[model_.backward[i].unit] = i;
    for (size_t i = 0; i < model_.backward.size(); ++i) {
      const auto& [unit, mark, stage] = model_.backward[i];
      if (mark != Mark::kEnd) move_inputs(unit, Phase::kHold, Phase::kBackward);
      if (mark != Mark::kGradient) settle_param(unit, Phase::kBackward);
      put({.op = Op::kBackward, .units = {unit}, .mark = mark});
      if (mark == Mark::kBegin) continue;
      if (mark != Mark::kUse) exchange(unit, model_.units[unit].in_backward);
      // The gradient of a unit that is visited again is summed before the last visit only if it
      // moves anyway.
      const bool moves_now = mark != Mark::kUse && !table_.holds_grad_in_place();
      const bool settles = moves_now || i == last_visit[unit];
      // The sum needs the gradient in memory, so it runs before the gradient is written to disk.
      if (settles && table_.grads_wait_on_disk()) {
        for (const Axis axis : kModelAxes) sum_addends(unit, axis);
      }
      if (settles) settle_grad(unit, last);
      settle_param(unit, last && i == last_visit[unit] ? Phase::kRest : Phase::kHold);
    }
  }

  const Section section_;
};

}  // namespace

const char* section_name(Section section) {
  static constexpr std::array<const char*, 7> kNames = {
      "forward", "forward_next", "eval", "backward", "backward_last", "update", "update_early"};
  return kNames[static_cast<size_t>(section)];
}

Plan plan_section(const Table& table, const ModelDesc& model, const Mesh& mesh, Section section) {
  return SectionWriter(table, model, mesh, section).write();
}

Plan plan_step(const Table& table, const ModelDesc& model, const Mesh& mesh, int num_micro) {
  PENSTOCK_ASSERT(num_micro > 0, concat("a step of ", num_micro, " micro-batches"));
  Plan plan;
  const auto append = [&](Section section) {
    Plan part = plan_section(table, model, mesh, section);
    std::move(part.steps.begin(), part.steps.end(), std::back_inserter(plan.steps));
  };
  for (int micro = 0; micro < num_micro; ++micro) {
    plan.steps.push_back({.op = Op::kMicro, .micro = micro});
    append(micro == 0 ? Section::kForward : Section::kForwardNext);
    append(micro + 1 < num_micro ? Section::kBackward : Section::kBackwardLast);
  }
  append(Section::kUpdate);
  return plan;
}

}  // namespace penstock
