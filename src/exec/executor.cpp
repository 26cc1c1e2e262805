#include "src/exec/executor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::exec {

std::vector<PlannedStep> prepare(const Plan& plan, const std::vector<UnitState>& units) {
  std::vector<PlannedStep> prepared;
  for (const Step& step : plan.steps) {
    std::vector<std::string> names;
    for (const int unit : step.units) names.push_back(units.at(unit).name);
    prepared.push_back({step, concat(step.text(), " (", join(names, ", "), ")"), false});
  }
  for (size_t i = 0; i < prepared.size(); ++i) {
    if (plan.steps[i].op != Op::kUpdate) continue;
    const auto next =
        std::find_if(plan.steps.begin() + static_cast<std::ptrdiff_t>(i), plan.steps.end(),
                     [&](const Step& step) {
                       return step.op == Op::kPublish && step.units == plan.steps[i].units;
                     });
    if (next == plan.steps.end()) continue;
    for (const Move& move : next->moves) {
      prepared[i].write_back |= move.kind == MoveKind::kCast || move.kind == MoveKind::kCopy;
    }
  }
  return prepared;
}

Executor::Executor(const Table& table, const Mesh& mesh, Group& group, mem::Tiers& tiers,
                   std::vector<UnitState> units)
    : table_(table.on(mesh)),
      mesh_(mesh),
      group_(group),
      tiers_(tiers),
      units_(std::move(units)),
      traffic_(tiers),
      activations_(table_.at(Role::kAct, Phase::kHold).tier),
      gather_channel_(group, "gather"),
      reduce_channel_(group, "reduce"),
      control_channel_(group, "control"),
      gather_lane_("penstock-gather"),
      reduce_lane_("penstock-reduce"),
      update_lane_("penstock-update") {
  set_step(1);
  for (UnitState& unit : units_) {
    unit.param_at = table_.at(Role::kParam, Phase::kRest);
    unit.attached = !table_.moves_params();
  }
}

comm::Members Executor::members(const std::vector<Axis>& axes) const {
  comm::Members members;
  members.ranks = mesh_.group(group_.rank(), axes);
  while (members.ranks[members.index] != group_.rank()) ++members.index;
  return members;
}

void Executor::run(const PlannedStep& planned) {
  const Step& step = planned.step;
  switch (step.op) {
    case Op::kMove:
      if (step.role == Role::kAct) return move_act(planned);
      if (step.role == Role::kOptim) return move_stored(planned);
      if (step.role == Role::kGrad && step.moves.front().from == Tier::kDisk) {
        return move_stored(planned);
      }
      return step.role == Role::kParam ? move_param(planned) : reduce(planned);
    case Op::kDrop:
      for (const int unit : step.units) drop(unit);
      return;
    case Op::kNorm:
      return norm(planned.text);
    case Op::kUpdate:
      return on_update_lane(
          step.units, [this, units = step.units, chunk = step.chunk, back = planned.write_back] {
            for (const int unit : units) update(unit, chunk, back);
          });
    case Op::kPublish:
      return publish(planned);
    case Op::kMicro:
    case Op::kForward:
    case Op::kBackward:
      return;  // compute is the user's
  }
}

// ---- parameters

// Either up to the device and gathered there, or cut down to a smaller copy.
void Executor::move_param(const PlannedStep& planned) {
  const std::vector<Move>& moves = planned.step.moves;
  if (moves.front().kind != MoveKind::kSlice) return bring_from(planned);
  for (const int unit : planned.step.units) slice(unit, moves);
}

// A plan starts from where one backward per forward leaves the parameters. Where they are elsewhere
// (a second backward finds them at rest, not in `hold`), the whole way is made instead.
void Executor::bring_from(const PlannedStep& planned) {
  PlannedStep direct = planned;
  direct.step.units.clear();
  const Placement& wanted = table_.at(Role::kParam, Phase::kForward);
  for (const int index : planned.step.units) {
    Placement place = units_[index].param_at;
    for (const Move& move : planned.step.moves) {
      if (applies(place, move)) place = apply(place, move);
    }
    if (full(index) || place == wanted) {
      direct.step.units.push_back(index);
    } else {
      run(move_to(index, Phase::kBackward));
    }
  }
  if (!direct.step.units.empty()) bring(direct);
}

// Memory for gathered copies of the units' flats; what rests on disk is on its way. When there is
// not enough, nothing has changed.
std::deque<mem::Lease> Executor::take_for(const std::vector<int>& units, int num_shards) {
  std::deque<mem::Lease> leases;
  try {
    for (const int index : units) {
      UnitState& unit = units_[index];
      unit.param_ready.wait();
      for (Flat& flat : unit.flats) {
        if (flat.rest.on_disk()) unit.updated.wait();  // the read starts here
        if (!unit.gathered) traffic_.fetch(flat.rest, mem::Account::kParam);
        const int64_t bytes = unit.gathered ? flat.current.bytes() : flat.rest.bytes;
        leases.push_back(tiers_.device.take(bytes * num_shards, mem::Account::kParam));
      }
    }
  } catch (...) {
    for (const int index : units) {
      for (Flat& flat : units_[index].flats) {
        if (flat.rest.on_disk()) traffic_.drop(flat.rest);
      }
    }
    throw;
  }
  return leases;
}

void Executor::bring(const PlannedStep& planned) {
  comm::Members group;
  for (const Move& move : planned.step.moves) {
    PENSTOCK_ASSERT(move.kind == MoveKind::kAllGather || move.kind == MoveKind::kCopy,
                    concat("[exec::bring] not executable here: ", planned.text));
    if (move.kind == MoveKind::kAllGather) group = members(move.axes);
  }
  const int num_shards = std::max(1, group.size());
  std::vector<int> coming;
  for (const int index : planned.step.units) {
    if (!full(index)) coming.push_back(index);  // off-plan reads may have brought it already
  }
  std::deque<mem::Lease> leases = take_for(coming, num_shards);
  std::vector<comm::GatherBuffer> buffers;
  std::vector<const Stored*> fetched;
  std::vector<const char*> sources;
  std::vector<Event> updated;
  for (const int index : coming) {
    UnitState& unit = units_[index];
    updated.push_back(unit.updated);
    for (Flat& flat : unit.flats) {
      sources.push_back(unit.gathered ? flat.current.data() : flat.rest.data());
      fetched.push_back(unit.gathered ? nullptr : &flat.rest);
      buffers.push_back({leases.front().data(), leases.front().bytes() / num_shards});
      if (unit.gathered) flat.retired = std::move(flat.current);
      flat.current = std::move(leases.front());
      leases.pop_front();
    }
    for (const Move& move : planned.step.moves) unit.param_at = apply(unit.param_at, move);
    unit.gathered = true;
  }
  const Event ready =
      gather_lane_.submit([this, group, buffers, sources, fetched, updated, label = planned.text] {
        for (const Event& update : updated) update.wait();
        for (size_t i = 0; i < buffers.size(); ++i) {
          if (fetched[i] != nullptr) traffic_.wait_read(*fetched[i]);
          std::memcpy(static_cast<char*>(buffers[i].full) + group.index * buffers[i].shard_bytes,
                      sources[i], buffers[i].shard_bytes);
        }
        if (group.size() > 1) gather_channel_.all_gather(label, group, buffers);
      });
  for (const int index : planned.step.units) units_[index].param_ready = ready;
}

void Executor::slice(int index, const std::vector<Move>& moves) {
  UnitState& unit = units_[index];
  unit.param_ready.wait();
  unit.updated.wait();
  if (unit.attached) {
    for (Flat& flat : unit.flats) flat.detach();
    unit.attached = false;
  }
  for (const Move& move : moves) {
    unit.param_at = apply(unit.param_at, move);
    if (move.kind != MoveKind::kSlice) continue;  // a copy is part of it
    const comm::Members group = members(move.axes);
    for (Flat& flat : unit.flats) {
      const char* whole = unit.gathered ? flat.current.data() : flat.rest.data();
      const int64_t bytes = (unit.gathered ? flat.current.bytes() : flat.rest.bytes) / group.size();
      mem::Lease piece =
          tiers_.arena(moves.back().kind == MoveKind::kCopy ? moves.back().to : Tier::kDevice)
              .take(bytes, mem::Account::kParam);
      std::memcpy(piece.data(), whole + group.index * bytes, bytes);
      flat.current = std::move(piece);
    }
    unit.gathered = true;
  }
}

// What an update needs, from disk and back.
void Executor::move_stored(const PlannedStep& planned) {
  const Move& move = planned.step.moves.front();
  PENSTOCK_ASSERT(planned.step.moves.size() == 1 && move.kind == MoveKind::kCopy,
                  concat("[exec::move_stored] not executable here: ", planned.text));
  on_update_lane(planned.step.units, [this, step = planned.step, move] {
    for (const int unit : step.units) {
      for (Flat& flat : units_[unit].flats) {
        if (flat.trainable) move_stored_of(flat, step.role, move, step.chunk);
      }
    }
  });
}

void Executor::move_stored_of(Flat& flat, Role role, const Move& move, const Chunk& chunk) {
  ChunkState& state = flat.chunks.at(chunk.index);
  if (role == Role::kGrad) {
    if (flat.summed) traffic_.fetch(state.gradient, mem::Account::kGrad);
    return;
  }
  for (Stored* copy : state.optimizer_state()) {
    if (move.from == Tier::kDisk) traffic_.fetch(*copy, mem::Account::kOptim);
    if (move.to == Tier::kDisk) traffic_.put_back(*copy);
  }
}

void Executor::move_act(const PlannedStep& planned) {
  const Move& move = planned.step.moves.front();
  PENSTOCK_ASSERT(move.kind == MoveKind::kCopy,
                  concat("[exec::move_act] not executable here: ", planned.text));
  for (const int unit : planned.step.units) {
    if (move.from == Tier::kDevice) {
      activations_.put_away(unit, units_[unit].name);
    } else {
      activations_.bring(unit);
    }
  }
}

bool Executor::full(int unit) const {
  return units_[unit].param_at == table_.at(Role::kParam, Phase::kForward);
}

void Executor::require(int index) {
  UnitState& unit = units_[index];
  unit.updated.wait();
  unit.param_ready.wait();
  for (Flat& flat : unit.flats) {
    flat.retired.reset();
    if (unit.gathered) traffic_.let_go(flat.rest);
  }
  if (unit.attached) return;
  PENSTOCK_ASSERT(full(index), concat("[exec::require] no step of the plan brought the parameters "
                                      "of unit u",
                                      index, " (", unit.name, ")"));
  for (Flat& flat : unit.flats) flat.attach(flat.current.data());
  unit.attached = true;
}

PlannedStep Executor::move_to(int unit, Phase phase) const {
  Step step;
  step.op = Op::kMove;
  step.units = {unit};
  step.role = Role::kParam;
  step.moves = hops(units_[unit].param_at, table_.at(Role::kParam, phase));
  const Placement& rest = table_.at(Role::kParam, Phase::kRest);
  if (table_.at(Role::kParam, phase) == rest) {
    step.op = Op::kDrop;
    step.moves.clear();
  }
  if (units_[unit].param_at == table_.at(Role::kParam, phase)) {  // nothing to do
    step.op = Op::kDrop;
    step.units.clear();
  }
  return {step, concat(step.text(), " (", units_[unit].name, ") off plan"), false};
}

void Executor::drop(int index) {
  UnitState& unit = units_[index];
  if (!unit.gathered) return;
  unit.param_ready.wait();
  for (Flat& flat : unit.flats) {
    if (unit.attached) flat.detach();
    flat.current.reset();
    flat.retired.reset();
    traffic_.let_go(flat.rest);
  }
  unit.attached = unit.gathered = false;
  unit.param_at = table_.at(Role::kParam, Phase::kRest);
}

void Executor::drain() {
  // The lanes are ordered, so an empty task at their end is done when all before it is.
  const std::array<Event, 3> ends = {gather_lane_.submit([] {}), reduce_lane_.submit([] {}),
                                     update_lane_.submit([] {})};
  for (const Event& end : ends) end.settle();  // all of them before one throws
  for (const Event& end : ends) end.wait();
  traffic_.settle();
}

// Between steps, when the lanes are idle (the step is part of every collective's tag).
void Executor::set_step(int64_t step) {
  gather_channel_.set_step(step);
  reduce_channel_.set_step(step);
  control_channel_.set_step(step);
}

}  // namespace penstock::exec
