#include "src/plan/pipeline.h"

#include <algorithm>
#include <set>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/step_writer.h"

namespace penstock {

namespace {

// The units of each stage, in their order in a pass.
using Stages = std::vector<std::vector<int>>;

[[noreturn]] void refuse(const std::string& why) {
  throw ConfigError("[plan::plan_pipeline] " + why);
}

Stages units_of(const ModelDesc& model, const std::vector<Visit>& order, int num_stages) {
  Stages stages(static_cast<size_t>(num_stages));
  for (const Visit& visit : order) {
    const UnitDesc& unit = model.units[visit.unit];
    if (visit.mark == Mark::kBegin || visit.mark == Mark::kEnd) {
      if (unit.flats.empty()) continue;
      refuse(concat("\"", unit.name, "\" encloses other units and has parameters of its own, ",
                    "which no stage can have: make them units (\"units.layer_bytes\": 1)"));
    }
    if (unit.stage < 0 || unit.stage >= num_stages) {
      refuse(concat("\"", unit.name, "\" is in stage ", unit.stage, " of ", num_stages));
    }
    stages[unit.stage].push_back(visit.unit);
  }
  return stages;
}

// In a forward, stages follow each other.
Stages check_order(const ModelDesc& model, int num_stages) {
  Stages stages = units_of(model, model.forward, num_stages);
  for (int stage = 0; stage < num_stages; ++stage) {
    if (stages[stage].empty()) {
      refuse(concat("stage ", stage, " of ", num_stages, " has no units; the model has ",
                    model.units.size()));
    }
  }
  int now = 0;
  for (const Visit& visit : model.forward) {
    const UnitDesc& unit = model.units[visit.unit];
    if (unit.flats.empty()) continue;
    if (unit.stage < now) {
      refuse(concat("\"", unit.name, "\" of stage ", unit.stage, " is computed after stage ", now));
    }
    now = unit.stage;
  }
  return stages;
}

class RankWriter : StepWriter {
 public:
  RankWriter(const Table& table, const ModelDesc& part, const Mesh& mesh, const Stages& forward,
             const Stages& backward, const std::vector<Action>& actions)
      : StepWriter(table, part, mesh), forward_(forward), backward_(backward), actions_(actions) {
    begin_params(Phase::kRest);
    uses_.resize(part.units.size());
    backwards_.resize(part.units.size());
    for (const Action& action : actions) {
      for (const int unit : order(action)) {
        ++uses_[unit];
        if (!action.forward) ++backwards_[unit];
      }
    }
  }

  // The action that comes now, or nothing at the end.
  const Action* next() const { return done_ < actions_.size() ? &actions_[done_] : nullptr; }

  void compute() {
    const Action& action = actions_[done_++];
    micro_ = action.micro;
    for (const int unit : order(action)) {
      if (action.forward) {
        forward(unit);
      } else {
        backward(unit);
      }
      settle_param(unit, --uses_[unit] > 0 ? Phase::kHold : Phase::kRest);
    }
  }

  // Of what the action made.
  void send(const Action& made) {
    const std::vector<int>& units = forward_[made.stage];
    transfer(Op::kSend, made, made.forward ? units.back() : units.front(), made.forward ? 1 : -1);
  }
  void receive(const Action& made) {
    const int stage = made.forward ? made.stage + 1 : made.stage - 1;
    const std::vector<int>& units = forward_[stage];
    transfer(Op::kReceive, made, made.forward ? units.front() : units.back(),
             made.forward ? -1 : 1);
  }

  Plan finish() && {
    update();
    return std::move(plan_);
  }

 private:
  const std::vector<int>& order(const Action& action) const {
    return (action.forward ? forward_ : backward_)[action.stage];
  }

  void forward(int unit) {
    settle_param(unit, Phase::kForward);
    put({.op = Op::kForward, .units = {unit}, .micro = micro_});
    sum_activations(unit, TensorSplit::kRow);
    move_inputs(unit, Phase::kForward, Phase::kHold);
  }

  void backward(int unit) {
    move_inputs(unit, Phase::kHold, Phase::kBackward);
    settle_param(unit, Phase::kBackward);
    put({.op = Op::kBackward, .units = {unit}, .micro = micro_});
    sum_activations(unit, TensorSplit::kColumn);
    const bool last = --backwards_[unit] == 0;
    if (!table_.holds_grad_in_place() || last) settle_grad(unit, last);
  }

  void transfer(Op op, const Action& made, int unit, int hop) {
    put({.op = op,
         .units = {unit},
         .role = made.forward ? Role::kAct : Role::kGrad,
         .micro = made.micro,
         .hop = hop});
  }

  const Stages& forward_;
  const Stages& backward_;
  const std::vector<Action>& actions_;
  size_t done_ = 0;
  std::vector<int> uses_, backwards_;  // to come, by unit
};

}  // namespace

ModelDesc part(const ModelDesc& model, int num_ranks, int rank) {
  ModelDesc own = model;
  for (UnitDesc& unit : own.units) {
    if (unit.stage % num_ranks != rank) unit.flats.clear();
  }
  return own;
}

std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule) {
  const int num_ranks = mesh.size(Axis::kPipeline), num_stages = schedule.num_stages();
  PENSTOCK_ASSERT(schedule.num_ranks() == num_ranks,
                  concat("a schedule of ", schedule.num_ranks(), " ranks on ", mesh.text()));
  check_schedule(schedule);
  const Stages forward = check_order(model, num_stages);
  const Stages backward = units_of(model, model.backward, num_stages);
  std::vector<ModelDesc> parts;
  for (int rank = 0; rank < num_ranks; ++rank) parts.push_back(part(model, num_ranks, rank));
  std::vector<RankWriter> writers;
  for (int rank = 0; rank < num_ranks; ++rank) {
    writers.emplace_back(table, parts[rank], mesh, forward, backward, schedule.ranks[rank]);
  }
  // One action a rank and round, so that what is received waits for its turn with the sender.
  std::set<Action> done;
  for (bool any = true; any;) {
    any = false;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Action* const next = writers[rank].next();
      if (next == nullptr) continue;
      const Action action = *next, needed = before(action, num_stages);
      if (needed.stage >= 0 && !done.contains(needed)) continue;
      if (!action.forward && !done.contains({action.stage, true, action.micro})) continue;
      any = true;
      writers[rank].compute();
      done.insert(action);
      const int to = action.forward ? action.stage + 1 : action.stage - 1;
      if (to < 0 || to == num_stages || to % num_ranks == rank) continue;
      writers[rank].send(action);
      writers[to % num_ranks].receive(action);
    }
  }
  std::vector<Plan> plans;
  for (RankWriter& writer : writers) plans.push_back(std::move(writer).finish());
  return plans;
}

}  // namespace penstock
