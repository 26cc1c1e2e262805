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
    if (visit.stage < 0 || visit.stage >= num_stages) {
      refuse_plan(concat("\"", model.units[visit.unit].name, "\" is in stage ", visit.stage, " of ",
                         num_stages));
    }
    stages[visit.stage].push_back(visit);
  }
  return stages;
}

// Throws unless a forward computes the stages in order. A unit without flats only encloses others.
void check_order(const ModelDesc& model, int num_stages) {
  std::vector<bool> computes(static_cast<size_t>(num_stages), false);
  int now = 0;
  for (const std::vector<Visit>& visits : by_stage(model, model.forward, num_stages)) {
    for (const Visit& visit : visits) {
      if (!model.units[visit.unit].flats.empty()) computes[visit.stage] = true;
    }
  }
  for (int stage = 0; stage < num_stages; ++stage) {
    if (computes[stage]) continue;
    refuse_plan(concat("stage ", stage, " of ", num_stages, " has no units; the model has only ",
                       model.units.size()));
  }
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
}

std::set<int> ranks_of(const ModelDesc& model, int unit, int num_ranks) {
  std::set<int> ranks;
  for (const Visit& visit : model.forward) {
    if (visit.unit == unit) ranks.insert(rank_of_stage(visit.stage, num_ranks));
  }
  return ranks;
}

void check_shared(const ModelDesc& model, int num_ranks, const Table& table) {
  for (int unit = 0; unit < static_cast<int>(model.units.size()); ++unit) {
    const std::vector<FlatDesc>& flats = model.units[unit].flats;
    const bool trains = std::any_of(flats.begin(), flats.end(),
                                    [](const FlatDesc& flat) { return flat.trainable; });
    if (!trains || !table.grads_wait_on_disk() || ranks_of(model, unit, num_ranks).size() < 2) {
      continue;
    }
    refuse_plan(concat("\"", model.units[unit].name,
                       "\" is in several stages (tied weights), and its gradients are held on "
                       "disk: hold them on the host"));
  }
}

// Returns the first or the last unit of a stage's forward. A unit that encloses others is returned
// only if the stage has no other unit.
int end_of(const std::vector<Visit>& visits, bool first) {
  const auto computes = [](const Visit& visit) {
    return visit.mark != Mark::kBegin && visit.mark != Mark::kEnd;
  };
  if (first) {
    const auto found = std::find_if(visits.begin(), visits.end(), computes);
    return (found == visits.end() ? visits.front() : *found).unit;
  }
  const auto found = std::find_if(visits.rbegin(), visits.rend(), computes);
  return (found == visits.rend() ? visits.back() : *found).unit;
}

// Returns the visits of one part of a split backward. A unit that begins and ends in the pass
// computes at the end. Frozen units have no second part.
std::vector<Visit> marked(const ModelDesc& model, const std::vector<Visit>& order, Mark part) {
  std::vector<Visit> visits;
  for (size_t i = 0; i < order.size(); ++i) {
    Visit visit = order[i];
    const std::vector<FlatDesc>& flats = model.units[visit.unit].flats;
    const bool frozen =
        !flats.empty() &&
        std::none_of(flats.begin(), flats.end(), [](const auto& one) { return one.trainable; });
    if (part == Mark::kWeights && frozen) continue;
    const bool ends_later =
        visit.mark == Mark::kBegin &&
        std::any_of(order.begin() + static_cast<ptrdiff_t>(i) + 1, order.end(),
                    [&](const Visit& later) { return later.unit == visit.unit; });
    if (!ends_later) visit.mark = part;
    visits.push_back(visit);
  }
  return visits;
}

// Writes the plan of one rank, one action of the schedule at a time.
class StageWriter : StepWriter {
 public:
  StageWriter(const Table& table, const ModelDesc& part, const Mesh& mesh, const Schedule& schedule,
              int rank)
      : StepWriter(table, part, mesh),
        num_ranks_(schedule.num_ranks()),
        num_stages_(schedule.num_stages()),
        rank_(rank),
        forward_(by_stage(part, part.forward, num_stages_)),
        backward_(by_stage(part, part.backward, num_stages_)) {
    begin_params(Phase::kRest);
    backwards_.resize(part.units.size());
    for (const Action& action : schedule.ranks[rank]) {
      if (action.is_last()) count(action.stage, 1);
    }
  }

  // `order` is in_rounds() of the schedule. If a rank ran ahead of its peer in this order, the
  // peer's plan would receive all messages of the rank before the peer uses the first one.
  StagePlan write(const std::vector<Action>& order) && {
    StagePlan made;
    for (const Action& action : order) {
      const int to = next_stage(action, num_stages_);
      const bool is_mine = rank_of_stage(action.stage, num_ranks_) == rank_;
      const bool crosses =
          to >= 0 && rank_of_stage(to, num_ranks_) != rank_of_stage(action.stage, num_ranks_);
      if (is_mine) compute(action);
      if (is_mine && crosses) transfer(Op::kSend, action, action.stage, action.forward ? 1 : -1);
      if (is_mine) made.actions.push_back(std::exchange(plan_, {}));
      if (crosses && rank_of_stage(to, num_ranks_) == rank_) {
        transfer(Op::kReceive, action, to, action.forward ? -1 : 1);
      }
    }
    update();
    made.update = std::move(plan_);
    return made;
  }

 private:
  void compute(const Action& action) {
    micro_ = action.micro;
    if (action.forward) return forward(forward_[action.stage], true, Phase::kHold);
    // No gradients leave the first stage, so its second part is the whole backward.
    const bool splits = action.part != BackwardPart::kAll && action.stage > 0;
    if (!action.is_last()) {
      if (!splits) return;
      return backward(marked(model_, backward_[action.stage], Mark::kInputs),
                      std::vector<bool>(backwards_.size(), false));
    }
    count(action.stage, -1);
    std::vector<bool> last;
    for (const int backwards : backwards_) last.push_back(backwards == 0);
    const std::vector<Visit>& visits = backward_[action.stage];
    backward(splits ? marked(model_, visits, Mark::kWeights) : visits, last);
  }

  // Counts a backward of a stage in each of its units.
  void count(int stage, int by) {
    std::set<int> units;
    for (const Visit& visit : backward_[stage]) units.insert(visit.unit);
    for (const int unit : units) backwards_[unit] += by;
  }

  // Writes the line that sends or receives the output of the action `made`. The line names the unit
  // of `stage` at which the output leaves or arrives.
  void transfer(Op op, const Action& made, int stage, int hop) {
    put({.op = op,
         .units = {end_of(forward_[stage], (op == Op::kReceive) == made.forward)},
         .role = made.forward ? Role::kAct : Role::kGrad,
         .micro = made.micro,
         .hop = hop});
  }

  const int num_ranks_, num_stages_, rank_;
  const Stages forward_, backward_;
  std::vector<int> backwards_;  // by unit: remaining backwards of this step that visit it
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

ModelDesc of_stage(const ModelDesc& model, int stage) {
  ModelDesc own = model;
  const auto elsewhere = [&](const Visit& visit) { return visit.stage != stage; };
  std::erase_if(own.forward, elsewhere);
  std::erase_if(own.backward, elsewhere);
  return own;
}

Plan StagePlan::joined() const {
  Plan all;
  for (const Plan& plan : actions) {
    all.steps.insert(all.steps.end(), plan.steps.begin(), plan.steps.end());
  }
  all.steps.insert(all.steps.end(), update.steps.begin(), update.steps.end());
  return all;
}

StagePlan plan_stages(const Table& table, const ModelDesc& part, const Mesh& mesh,
                      const Schedule& schedule, int rank) {
  return StageWriter(table, part, mesh, schedule, rank).write(in_rounds(schedule));
}

std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule) {
  const int num_ranks = mesh.size(Axis::kPipeline);
  PENSTOCK_ASSERT(schedule.num_ranks() == num_ranks,
                  concat("a schedule of ", schedule.num_ranks(), " ranks on ", mesh.text()));
  check_schedule(schedule);
  check_order(model, schedule.num_stages());
  check_shared(model, num_ranks, table);
  const ModelDesc held = with_holders(model, num_ranks);
  const std::vector<Action> order = in_rounds(schedule);
  std::vector<Plan> plans;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const ModelDesc own = part(held, num_ranks, rank);
    plans.push_back(StageWriter(table, own, mesh, schedule, rank).write(order).joined());
  }
  return plans;
}

}  // namespace penstock
