#include "src/plan/pipeline_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/step_writer.h"

namespace penstock {

namespace {

// The visits of each stage, in the order of a forward or backward.
using Stages = std::vector<std::vector<Visit>>;

[[noreturn]] void refuse_plan(const std::string& why) {
  throw ConfigError("[plan::plan_pipeline] " + why);
}

Stages by_stage(const ModelDesc& model, const std::vector<Visit>& order, int num_stages) {
  Stages stages(static_cast<size_t>(num_stages));
  for (const Visit& visit : order) {
    const UnitDesc& unit = model.units[visit.unit];
    if (unit.flats.empty()) continue;  // the unit only encloses others
    if (visit.mark == Mark::kUse || visit.mark == Mark::kGradient) {
      refuse_plan(concat("\"", unit.name,
                         "\" needs its parameters in one visit and produces its gradient in ",
                         "another (tiles, rows that are looked up); pipelines do not support this "
                         "yet"));
    }
    if (visit.stage < 0 || visit.stage >= num_stages) {
      refuse_plan(concat("\"", unit.name, "\" is in stage ", visit.stage, " of ", num_stages));
    }
    stages[visit.stage].push_back(visit);
  }
  return stages;
}

// Returns the visits of each stage. Throws unless a forward computes the stages in order.
Stages check_order(const ModelDesc& model, int num_stages) {
  Stages stages = by_stage(model, model.forward, num_stages);
  for (int stage = 0; stage < num_stages; ++stage) {
    if (stages[stage].empty()) {
      refuse_plan(concat("stage ", stage, " of ", num_stages, " has no units; the model has only ",
                         model.units.size()));
    }
  }
  int now = 0;
  for (const Visit& visit : model.forward) {
    const UnitDesc& unit = model.units[visit.unit];
    if (unit.flats.empty()) continue;
    if (visit.stage < now) {
      refuse_plan(
          concat("\"", unit.name, "\" of stage ", visit.stage, " is computed after stage ", now,
                 visit.mark == Mark::kEnd ? ": it encloses other units; make its own layers "
                                            "units, too (\"units.layer_bytes\": 1)"
                                          : ""));
    }
    now = visit.stage;
  }
  return stages;
}

std::set<int> ranks_of(const ModelDesc& model, int unit, int num_ranks) {
  std::set<int> ranks;
  for (const Visit& visit : model.forward) {
    if (visit.unit == unit) ranks.insert(visit.stage % num_ranks);
  }
  return ranks;
}

// Returns the units that this rank trains together with other ranks.
std::vector<int> shared_by(const ModelDesc& model, int num_ranks, int rank, const Table& table) {
  std::vector<int> shared;
  for (int unit = 0; unit < static_cast<int>(model.units.size()); ++unit) {
    const std::set<int> ranks = ranks_of(model, unit, num_ranks);
    const std::vector<FlatDesc>& flats = model.units[unit].flats;
    const bool trains = std::any_of(flats.begin(), flats.end(),
                                    [](const FlatDesc& flat) { return flat.trainable; });
    if (!trains || ranks.size() < 2 || !ranks.contains(rank)) continue;
    if (table.grads_wait_on_disk()) {
      refuse_plan(concat("\"", model.units[unit].name,
                         "\" is in several stages (tied weights), and its ",
                         "gradients are held on disk: hold them on the host"));
    }
    shared.push_back(unit);
  }
  return shared;
}

// Writes one rank's plan, one action of the schedule at a time.
class RankWriter : StepWriter {
 public:
  RankWriter(const Table& table, const ModelDesc& part, const Mesh& mesh, const Stages& forward,
             const Stages& backward, const std::vector<Action>& actions)
      : StepWriter(table, part, mesh), forward_(forward), backward_(backward), actions_(actions) {
    begin_params(Phase::kRest);
    uses_.resize(part.units.size());
    backwards_.resize(part.units.size());
    for (const Action& action : actions) {
      for (const Visit& visit : order(action)) {
        ++uses_[visit.unit];
        if (!action.forward) ++backwards_[visit.unit];
      }
    }
  }

  // Writes the next action.
  void compute() {
    const Action& action = actions_[done_++];
    micro_ = action.micro;
    const std::vector<Visit>& visits = order(action);
    for (size_t i = 0; i < visits.size(); ++i) {
      const Visit& visit = visits[i];
      // A unit that encloses other units of its stage stays whole while they run.
      const bool stays = std::any_of(
          visits.begin() + static_cast<std::ptrdiff_t>(i) + 1, visits.end(),
          [&](const Visit& later) { return later.unit == visit.unit && later.mark == Mark::kEnd; });
      if (action.forward) {
        forward(visit);
      } else {
        backward(visit, stays);
      }
      --uses_[visit.unit];
      if (stays) continue;
      settle_param(visit.unit, uses_[visit.unit] > 0 ? Phase::kHold : Phase::kRest);
    }
  }

  // Writes the send or the receive of an action's result.
  void send(const Action& made) {
    const std::vector<Visit>& visits = forward_[made.stage];
    const Visit& visit = made.forward ? visits.back() : visits.front();
    transfer(Op::kSend, made, visit.unit, made.forward ? 1 : -1);
  }
  void receive(const Action& made) {
    const std::vector<Visit>& visits = forward_[made.forward ? made.stage + 1 : made.stage - 1];
    const Visit& visit = made.forward ? visits.front() : visits.back();
    transfer(Op::kReceive, made, visit.unit, made.forward ? -1 : 1);
  }

  // `shared`: units that this rank shares with other ranks.
  Plan finish(const std::vector<int>& shared) && {
    for (const int unit : shared) sum_addends(unit, Axis::kPipeline);
    update();
    return std::move(plan_);
  }

 private:
  const std::vector<Visit>& order(const Action& action) const {
    return (action.forward ? forward_ : backward_)[action.stage];
  }

  void forward(const Visit& visit) {
    const int unit = visit.unit;
    settle_param(unit, Phase::kForward);
    put({.op = Op::kForward, .units = {unit}, .mark = visit.mark, .micro = micro_});
    if (visit.mark != Mark::kBegin) exchange(unit, model_.units[unit].in_forward);
    move_inputs(unit, Phase::kForward, Phase::kHold);
  }

  void backward(const Visit& visit, bool stays) {
    const int unit = visit.unit;
    move_inputs(unit, Phase::kHold, Phase::kBackward);
    settle_param(unit, Phase::kBackward);
    put({.op = Op::kBackward, .units = {unit}, .mark = visit.mark, .micro = micro_});
    if (visit.mark != Mark::kBegin) exchange(unit, model_.units[unit].in_backward);
    const bool last = --backwards_[unit] == 0, on_disk = table_.grads_wait_on_disk();
    const bool settles = (!table_.holds_grad_in_place() && !stays) || last;
    if (settles && on_disk) sum_in_stage(unit);
    if (settles) settle_grad(unit, last);
    if (last && !on_disk) sum_in_stage(unit);
  }

  // The stages add up the gradients of tied weights at the end of the step.
  void sum_in_stage(int unit) {
    for (const Axis axis : kModelAxes) {
      if (axis != Axis::kPipeline) sum_addends(unit, axis);
    }
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
  std::vector<int> uses_, backwards_;  // remaining uses and backwards, by unit
};

}  // namespace

ModelDesc part(const ModelDesc& model, int num_ranks, int rank) {
  ModelDesc own = model;
  for (size_t unit = 0; unit < own.units.size(); ++unit) {
    if (!ranks_of(model, static_cast<int>(unit), num_ranks).contains(rank)) {
      own.units[unit].flats.clear();
    }
  }
  return own;
}

ModelDesc with_holders(ModelDesc model, int num_ranks) {
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const std::set<int> ranks = ranks_of(model, static_cast<int>(unit), num_ranks);
    for (FlatDesc& flat : model.units[unit].flats) {
      AxisHolding& holding = flat.placement.on(Axis::kPipeline);
      holding.holders.assign(ranks.begin(), ranks.end());
      if (ranks.size() > 1 && flat.trainable) holding.layout = Layout::kPartial;
    }
  }
  return model;
}

std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule) {
  const int num_ranks = mesh.size(Axis::kPipeline), num_stages = schedule.num_stages();
  PENSTOCK_ASSERT(schedule.num_ranks() == num_ranks,
                  concat("a schedule of ", schedule.num_ranks(), " ranks on ", mesh.text()));
  check_schedule(schedule);
  const Stages forward = check_order(model, num_stages);
  const Stages backward = by_stage(model, model.backward, num_stages);
  const ModelDesc held = with_holders(model, num_ranks);
  std::vector<ModelDesc> parts;
  for (int rank = 0; rank < num_ranks; ++rank) parts.push_back(part(held, num_ranks, rank));
  std::vector<RankWriter> writers;
  for (int rank = 0; rank < num_ranks; ++rank) {
    writers.emplace_back(table, parts[rank], mesh, forward, backward, schedule.ranks[rank]);
  }
  // In rounds: if a rank went ahead here, its peer's plan would receive all messages of this rank
  // before the peer computes with the first one.
  for (const Action& action : in_rounds(schedule)) {
    const int rank = action.stage % num_ranks, to = next_stage(action, num_stages);
    writers[rank].compute();
    if (to < 0 || to % num_ranks == rank) continue;
    writers[rank].send(action);
    writers[to % num_ranks].receive(action);
  }
  std::vector<Plan> plans;
  for (int rank = 0; rank < num_ranks; ++rank) {
    plans.push_back(std::move(writers[rank]).finish(shared_by(model, num_ranks, rank, table)));
  }
  return plans;
}

}  // namespace penstock
