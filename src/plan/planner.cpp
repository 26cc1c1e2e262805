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
        update();
        break;
    }
    return std::move(plan_);
  }

 private:
  void forward(Phase before, Phase after) {
    begin_params(before);
    StepWriter::forward(model_.forward, section_ != Section::kEval, after);
  }

  void backward() {
    begin_params(Phase::kHold);
    StepWriter::backward(model_.backward, std::vector<bool>(model_.units.size(),
                                                            section_ == Section::kBackwardLast));
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
