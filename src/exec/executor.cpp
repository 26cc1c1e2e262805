#include "src/exec/executor.h"

#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::exec {

std::vector<PlannedStep> prepare(const Plan& plan) {
  std::vector<PlannedStep> prepared;
  for (const Step& step : plan.steps) prepared.push_back({step, step.text(), false});
  for (size_t i = 0; i + 1 < prepared.size(); ++i) {
    const Step& next = plan.steps[i + 1];
    if (plan.steps[i].op != Op::kUpdate || next.op != Op::kPublish) continue;
    for (const Move& move : next.moves) {
      prepared[i].write_back |= move.kind == MoveKind::kCast && next.units == plan.steps[i].units;
    }
  }
  return prepared;
}

Executor::Executor(const Table& table, const Mesh& mesh, Group& group, mem::Arena& arena,
                   std::vector<UnitState> units)
    : table_(table.on(mesh)),
      mesh_(mesh),
      group_(group),
      arena_(arena),
      units_(std::move(units)),
      gather_channel_(group, "gather"),
      reduce_channel_(group, "reduce"),
      control_channel_(group, "control"),
      gather_lane_("penstock-gather"),
      reduce_lane_("penstock-reduce") {
  set_step(1);
  for (UnitState& unit : units_) {
    unit.param_at = table_.at(Role::kParam, Phase::kRest);
    unit.attached = !unit.param_at.sharded();
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
      return step.role == Role::kParam ? move_param(planned) : reduce(planned);
    case Op::kDrop:
      for (const int unit : step.units) drop(unit);
      return;
    case Op::kNorm:
      return norm(planned.text);
    case Op::kUpdate:
      for (const int unit : step.units) update(unit, planned.write_back);
      return;
    case Op::kPublish:
      return publish(planned);
    case Op::kMicro:
    case Op::kForward:
    case Op::kBackward:
      return;  // compute is the user's
  }
}

// ---- parameters

void Executor::move_param(const PlannedStep& planned) {
  PENSTOCK_ASSERT(planned.step.moves.size() == 1,
                  concat("[exec::move_param] not executable here: ", planned.text));
  const Move& move = planned.step.moves.front();
  if (move.kind == MoveKind::kAllGather) return gather(planned, move);
  PENSTOCK_ASSERT(move.kind == MoveKind::kSlice,
                  concat("[exec::move_param] not executable here: ", planned.text));
  for (const int unit : planned.step.units) slice(unit, move);
}

void Executor::gather(const PlannedStep& planned, const Move& move) {
  const comm::Members group = members(move.axes);
  std::vector<comm::GatherBuffer> buffers;
  std::vector<const char*> sources;
  for (const int index : planned.step.units) {
    UnitState& unit = units_[index];
    if (full(index)) continue;  // off-plan reads may have brought it already
    unit.param_ready.wait();
    unit.param_at = apply(unit.param_at, move);
    for (Flat& flat : unit.flats) {
      mem::Lease& source = unit.gathered ? flat.current : flat.rest;
      sources.push_back(source.data());
      buffers.push_back({nullptr, source.bytes()});
      if (unit.gathered) flat.retired = std::move(flat.current);
      flat.current = arena_.take(buffers.back().shard_bytes * group.size(), mem::Account::kParam);
      buffers.back().full = flat.current.data();
    }
    unit.gathered = true;
  }
  const Event ready = gather_lane_.submit([this, group, buffers, sources, label = planned.text] {
    for (size_t i = 0; i < buffers.size(); ++i) {
      std::memcpy(static_cast<char*>(buffers[i].full) + group.index * buffers[i].shard_bytes,
                  sources[i], buffers[i].shard_bytes);
    }
    gather_channel_.all_gather(label, group, buffers);
  });
  for (const int index : planned.step.units) units_[index].param_ready = ready;
}

void Executor::slice(int index, const Move& move) {
  const comm::Members group = members(move.axes);
  UnitState& unit = units_[index];
  unit.param_ready.wait();
  if (unit.attached) {
    for (Flat& flat : unit.flats) flat.detach();
    unit.attached = false;
  }
  for (Flat& flat : unit.flats) {
    const mem::Lease& whole = unit.gathered ? flat.current : flat.rest;
    const int64_t bytes = whole.bytes() / group.size();
    mem::Lease piece = arena_.take(bytes, mem::Account::kParam);
    std::memcpy(piece.data(), whole.data() + group.index * bytes, bytes);
    flat.current = std::move(piece);
  }
  unit.gathered = true;
  unit.param_at = apply(unit.param_at, move);
}

bool Executor::full(int unit) const { return !units_[unit].param_at.sharded(); }

void Executor::require(int index) {
  UnitState& unit = units_[index];
  unit.param_ready.wait();
  for (Flat& flat : unit.flats) flat.retired.reset();
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
  if (units_[unit].param_at == table_.at(Role::kParam, phase)) step.units.clear();
  return {step, step.text() + " off plan", false};
}

void Executor::drop(int index) {
  UnitState& unit = units_[index];
  if (!unit.gathered) return;
  unit.param_ready.wait();
  for (Flat& flat : unit.flats) {
    if (unit.attached) flat.detach();
    flat.current.reset();
    flat.retired.reset();
  }
  unit.attached = unit.gathered = false;
  unit.param_at = table_.at(Role::kParam, Phase::kRest);
}

void Executor::drain() {
  // The lanes are ordered, so an empty task at their end is done when all before it is.
  gather_lane_.submit([] {}).wait();
  reduce_lane_.submit([] {}).wait();
}

// Between steps, when the lanes are idle (the step is part of every collective's tag).
void Executor::set_step(int64_t step) {
  gather_channel_.set_step(step);
  reduce_channel_.set_step(step);
  control_channel_.set_step(step);
}

}  // namespace penstock::exec
