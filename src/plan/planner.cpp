#include "src/plan/planner.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/copies.h"

namespace penstock {

namespace {

bool trains(const UnitDesc& unit) {
  return std::any_of(unit.flats.begin(), unit.flats.end(),
                     [](const FlatDesc& flat) { return flat.trainable; });
}

// Writes one section; knows placements only.
class SectionWriter {
 public:
  SectionWriter(const Table& table, const ModelDesc& model, const Mesh& mesh, Section section)
      : table_(table.on(mesh)),
        model_(model),
        mesh_(mesh),
        section_(section),
        publish_(table_.publish()) {}

  Plan write() && {
    switch (section_) {
      case Section::kForward:
        forward(Phase::kHold);
        break;
      case Section::kEval:
        forward(Phase::kRest);
        break;
      case Section::kBackward:
      case Section::kBackwardLast:
        backward();
        break;
      case Section::kUpdateEarly:
        for (int unit = num_units() - 1; unit >= 0 && !table_.grads_wait_on_disk(); --unit)
          move_grad(unit, Phase::kHold, Phase::kUpdate);
        [[fallthrough]];
      case Section::kUpdate:
        update();
        break;
    }
    return std::move(plan_);
  }

 private:
  int num_units() const { return static_cast<int>(model_.units.size()); }
  const Placement& cell(Role role, Phase phase) const { return table_.at(role, phase); }

  void move(int unit, Role role, const Placement& from, const Placement& to, Chunk chunk = {}) {
    std::vector<Move> moves = hops(from, to);
    if (moves.empty()) return;
    plan_.steps.push_back({.op = Op::kMove,
                           .units = {unit},
                           .role = role,
                           .moves = std::move(moves),
                           .chunk = chunk});
  }

  // Makes a unit's cell true. Going back to rest is free: the authority never left.
  void settle_param(int unit, Phase phase) {
    const Placement& want = cell(Role::kParam, phase);
    Copies& book = params_[unit];
    if (book.current() == want) return;
    if (want == cell(Role::kParam, Phase::kRest)) {
      plan_.steps.push_back({.op = Op::kDrop, .units = {unit}, .role = Role::kParam});
      book.drop();
      return;
    }
    std::vector<Move> moves = book.way_to(want);
    book.move(moves);
    plan_.steps.push_back(
        {.op = Op::kMove, .units = {unit}, .role = Role::kParam, .moves = std::move(moves)});
  }

  // The books of all units at the begin of a section that finds parameters in this phase.
  void begin_params(Phase phase) {
    Copies book = Copies::resting(cell(Role::kParam, Phase::kRest));
    book.make(cell(Role::kParam, phase));
    params_.assign(model_.units.size(), book);
  }

  void move_grad(int unit, Phase from, Phase to, Chunk chunk = {}) {
    if (trains(model_.units[unit]))
      move(unit, Role::kGrad, cell(Role::kGrad, from), cell(Role::kGrad, to), chunk);
  }

  // The sum over tensor ranks that a split unit's output (forward) or input gradient needs.
  void sum_activations(int unit, TensorSplit split) {
    if (mesh_.size(Axis::kTensor) == 1 || model_.units[unit].split != split) return;
    plan_.steps.push_back({.op = Op::kMove,
                           .units = {unit},
                           .role = Role::kAct,
                           .moves = {{.kind = MoveKind::kAllReduce, .axes = {Axis::kTensor}}}});
  }

  // The inputs that a recomputed unit's backward starts from.
  void move_inputs(int unit, Phase from, Phase to) {
    if (model_.units[unit].recomputed)
      move(unit, Role::kAct, cell(Role::kAct, from), cell(Role::kAct, to));
  }

  void forward(Phase after) {
    begin_params(Phase::kRest);
    for (const auto& [unit, mark] : model_.forward) {
      settle_param(unit, Phase::kForward);
      plan_.steps.push_back({.op = Op::kForward, .units = {unit}, .mark = mark});
      if (mark == Mark::kBegin) continue;
      sum_activations(unit, TensorSplit::kRow);
      if (section_ == Section::kForward) move_inputs(unit, Phase::kForward, Phase::kHold);
      settle_param(unit, after);
    }
  }

  void backward() {
    const bool last = section_ == Section::kBackwardLast;
    begin_params(Phase::kHold);
    std::vector<size_t> last_visit(model_.units.size(), 0);
    for (size_t i = 0; i < model_.backward.size(); ++i) last_visit[model_.backward[i].unit] = i;
    for (size_t i = 0; i < model_.backward.size(); ++i) {
      const auto& [unit, mark] = model_.backward[i];
      if (mark != Mark::kEnd) move_inputs(unit, Phase::kHold, Phase::kBackward);
      if (mark != Mark::kGradient) settle_param(unit, Phase::kBackward);
      plan_.steps.push_back({.op = Op::kBackward, .units = {unit}, .mark = mark});
      if (mark == Mark::kBegin) continue;
      sum_activations(unit, TensorSplit::kColumn);
      // What is visited again adds up first where that takes no more memory.
      const bool moves_now = mark != Mark::kUse && !table_.holds_grad_in_place();
      if (moves_now || i == last_visit[unit]) settle_grad(unit, last);
      settle_param(unit, Phase::kRest);
    }
  }

  // A gradient held in place is added up before it moves; any other moves first and is added up
  // where it arrives.
  void settle_grad(int unit, bool last) {
    const bool in_place = table_.holds_grad_in_place();
    const bool goes_straight = cell(Role::kGrad, Phase::kHold) == cell(Role::kGrad, Phase::kUpdate);
    if (!in_place) move_grad(unit, Phase::kBackward, Phase::kHold);
    if (last && !goes_straight && !table_.grads_wait_on_disk())
      move_grad(unit, Phase::kHold, Phase::kUpdate);
  }

  void update() {
    plan_.steps.push_back({.op = Op::kNorm});
    for (int unit = 0; unit < num_units(); ++unit) {
      if (!trains(model_.units[unit])) continue;
      // What changes its layout on the way moves whole.
      if (table_.grads_wait_on_disk() && !table_.grads_come_in_chunks()) {
        move_grad(unit, Phase::kHold, Phase::kUpdate);
      }
      const int count = model_.units[unit].num_chunks;
      for (int index = 0; index < count; ++index) update_chunk(unit, {index, count});
    }
  }

  void update_chunk(int unit, const Chunk& chunk) {
    const Placement& rest = cell(Role::kOptim, Phase::kRest);
    const Placement& at = cell(Role::kOptim, Phase::kUpdate);
    move(unit, Role::kOptim, rest, at, chunk);
    if (table_.grads_come_in_chunks()) move_grad(unit, Phase::kHold, Phase::kUpdate, chunk);
    plan_.steps.push_back({.op = Op::kUpdate, .units = {unit}, .chunk = chunk});
    const bool chunks = table_.publishes_chunks();
    if (!publish_.empty() && (chunks || chunk.last())) {
      plan_.steps.push_back({.op = Op::kPublish,
                             .units = {unit},
                             .moves = publish_,
                             .chunk = chunks ? chunk : Chunk{}});
    }
    move(unit, Role::kOptim, at, rest, chunk);
  }

  const Table table_;
  const ModelDesc& model_;
  const Mesh mesh_;
  const Section section_;
  const std::vector<Move> publish_;
  std::vector<Copies> params_;
  Plan plan_;
};

}  // namespace

const char* section_name(Section section) {
  static constexpr std::array<const char*, 6> kNames = {"forward",       "eval",   "backward",
                                                        "backward_last", "update", "update_early"};
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
    append(Section::kForward);
    append(micro + 1 < num_micro ? Section::kBackward : Section::kBackwardLast);
  }
  append(Section::kUpdate);
  return plan;
}

}  // namespace penstock
