#include "src/exec/params.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "src/base/text.h"
#include "src/base/turns.h"

namespace penstock::exec {

bool Params::leaves(const std::vector<Move>& moves) const {
  const std::optional<Placement> to = apply_all(rank_.whole(), moves);
  return to && *to != rank_.whole();
}

bool Params::whole(int unit) const { return rank_.units[unit].params.current() == rank_.whole(); }

// The plan assumes one backward per forward, with the unit in phase `hold`. A second backward finds
// the unit at rest. The unit is then moved from its actual placement.
void Params::run(const PlannedStep& planned) {
  const std::vector<Move>& moves = planned.step.moves;
  const bool away = leaves(moves);
  std::vector<int> together;
  for (const int unit : planned.step.units) {
    if (away != whole(unit)) continue;  // an off-plan read has already moved it
    const std::optional<Placement> from = rank_.units[unit].params.source(moves);
    if (away || (from && apply_all(*from, moves) == rank_.whole())) {
      together.push_back(unit);
    } else {
      move_to(unit, Phase::kBackward);
    }
  }
  if (!together.empty()) go(together, moves, planned.label);
}

void Params::move_to(int index, Phase phase, const Wires& wires) {
  const Placement& wanted = rank_.cell(Role::kParam, phase);
  const Copies& book = rank_.units[index].params;
  if (book.current() == wanted) return;
  if (wanted == rank_.cells.param_rest) return drop(index);
  if (wanted != rank_.whole() && !whole(index)) return;  // the unit may also stay at rest
  const std::vector<Move> moves = book.way_to(wanted, wires);
  const Step step{.op = Op::kMove, .units = {index}, .moves = moves};
  go({index}, moves, concat(step.text(), " (", rank_.units[index].name, ")", kOffPlan));
}

void Params::go(const std::vector<int>& units, const std::vector<Move>& moves,
                const comm::Label& label) {
  const Placement from = *rank_.units[units.front()].params.source(moves);
  if (apply_all(from, moves) == rank_.whole()) return bring(units, from, moves, label);
  for (const int unit : units) put_away(unit, moves, label);
}

// Starts the reads of source copies that are on disk. `straight`: the caller starts them.
void Params::fetch(const std::vector<int>& units, const Placement& from, bool straight) {
  for (const int index : units) {
    UnitState& unit = rank_.units[index];
    unit.param_ready.wait();
    // The read must come after the update's write.
    if (from.tier == Tier::kDisk) unit.updated.wait();
    for (Flat& flat : unit.flats) {
      if (!straight) rank_.traffic.fetch(find(flat.params, from)->one(), mem::Account::kParam);
    }
  }
}

// Gives memory to which reads may still write to the buffers on disk.
void Params::return_memory(const std::vector<int>& units, const Placement& from,
                           std::vector<std::vector<Copy>>& arriving) {
  for (size_t i = 0; i < units.size(); ++i) {
    std::vector<Flat>& flats = rank_.units[units[i]].flats;
    for (size_t f = 0; f < arriving[i].size(); ++f) {
      Buffer& source = find(flats[f].params, from)->one();
      source.memory = std::move(arriving[i][f].one().memory);
      source.moving = arriving[i][f].one().moving;
    }
  }
}

void Params::bring(const std::vector<int>& units, const Placement& from,
                   const std::vector<Move>& moves, const comm::Label& label) {
  auto walk = std::make_shared<Walk>(rank_.walk(from, moves));
  std::vector<std::vector<Copy>> arriving(units.size());
  std::vector<device::Fence> updated;
  const bool straight = walk->route().only_reads() && !rank_.on_accelerator();
  try {  // if there is too little memory, this throws before anything has changed
    fetch(units, from, straight);
    for (size_t i = 0; i < units.size(); ++i) {
      UnitState& unit = rank_.units[units[i]];
      updated.push_back(unit.updated);
      for (Flat& flat : unit.flats) {
        const Buffer& source = find(flat.params, from)->one();
        std::vector<Copy> made;
        Copy& copy = rank_.open(made, walk->route().to, flat, mem::Account::kParam);
        Buffer& working = copy.one();
        if (straight && source.exists()) {
          working.moving = rank_.traffic.read(source, working.data());
        }
        walk->add(rank_.meshes.of(flat),
                  {straight ? working.data() : source.data(), working.data(), source.dtype,
                   working.dtype, flat.numel, false, straight ? working.moving : source.moving});
        arriving[i].push_back(std::move(copy));
      }
    }
    walk->ready();
  } catch (...) {
    if (straight) return_memory(units, from, arriving);
    for (const int index : units) {
      for (Flat& flat : rank_.units[index].flats) {
        Buffer& source = find(flat.params, from)->one();
        if (source.on_disk()) rank_.traffic.drop(source);
      }
    }
    throw;
  }
  for (size_t i = 0; i < units.size(); ++i) {
    UnitState& unit = rank_.units[units[i]];
    if (from == rank_.cells.param_rest) unit.codings.clear();
    for (const Move& move : moves) {
      if (move.wire.lossy()) unit.codings.push_back(move.wire);
    }
    arrive(unit, moves, std::move(arriving[i]));
  }
  const auto turn = lanes_.take_turn(*walk);
  const device::Fence ready = lanes_.gather.submit([this, walk, updated, label, turn] {
    for (const device::Fence& update : updated) update.wait();
    walk->run(rank_.channels.gather, label, 0, turn.get());
  });
  for (const int unit : units) {
    rank_.units[unit].param_ready = ready;
    rank_.units[unit].gathering = walk;
  }
}

// Waits for the last move. The move's sources and scratch memory are freed here, on the model's
// thread, so that memory peaks do not depend on the lane's timing.
void Params::settle(UnitState& unit) {
  unit.param_ready.wait();
  unit.leaving.clear();
  if (unit.gathering) unit.gathering->let_go();
  unit.gathering.reset();
}

// Adds one new copy per flat and removes the previous working copy.
void Params::arrive(UnitState& unit, const std::vector<Move>& moves, std::vector<Copy> copies) {
  const Placement rest = unit.params.places().back();
  for (size_t f = 0; f < unit.flats.size(); ++f) {
    std::vector<Copy>& params = unit.flats[f].params;
    for (Copy& copy : params) {
      if (copy.place == rest || !copy.valid) continue;
      unit.leaving.push_back(std::move(copy.one().memory));
      copy.valid = false;
    }
    std::erase_if(params, [](const Copy& copy) { return !copy.valid && !copy.one().on_disk(); });
    params.push_back(std::move(copies[f]));
  }
  unit.params.move(moves);
}

void Params::put_away(int index, const std::vector<Move>& moves, const comm::Label& label) {
  UnitState& unit = rank_.units[index];
  settle(unit);
  unit.updated.wait();
  rank_.traffic.settle();  // ends the write of the previous unit, which holds its memory
  const Placement from = *unit.params.source(moves);
  Walk walk = rank_.walk(from, moves);
  std::vector<Copy*> made;
  for (Flat& flat : unit.flats) {
    flat.params.reserve(flat.params.size() + 1);  // so that `source` stays valid
    const Buffer& source = find(flat.params, from)->one();
    Copy& copy = rank_.open(flat.params, walk.route().to, flat, mem::Account::kParam);
    walk.add(rank_.meshes.of(flat),
             {source.data(), copy.one().data(), source.dtype, copy.one().dtype, flat.numel});
    made.push_back(&copy);
  }
  detach(unit);
  walk.run(rank_.channels.gather, label);
  for (size_t f = 0; f < made.size(); ++f) {
    rank_.traffic.put_back(made[f]->one());
    std::erase_if(unit.flats[f].params, [&](const Copy& copy) {
      return copy.place == from && from != unit.params.places().back();
    });
  }
  unit.params.move(moves);
}

void Params::require(int index) {
  move_to(index, Phase::kForward);
  show(index);
}

void Params::require_exact(int index) {
  if (coded(index)) drop(index);
  move_to(index, Phase::kForward, {});
  show(index);
}

// Waits for the move of a unit that is whole, and sets the windows.
void Params::show(int index) {
  UnitState& unit = rank_.units[index];
  unit.updated.wait();
  settle(unit);
  for (Flat& flat : unit.flats) {
    for (Copy& copy : flat.params) {
      if (copy.place != rank_.whole()) rank_.traffic.let_go(copy.one());
    }
  }
  attach(unit);
}

void Params::attach(UnitState& unit) {
  if (unit.attached) return;
  for (Flat& flat : unit.flats) flat.attach(find(flat.params, rank_.whole())->one().data());
  unit.attached = true;
}

void Params::detach(UnitState& unit) {
  if (!unit.attached) return;
  for (Flat& flat : unit.flats) flat.detach();
  unit.attached = false;
}

void Params::drop(int index) {
  UnitState& unit = rank_.units[index];
  if (unit.params.at_rest()) return;
  settle(unit);
  detach(unit);
  const Placement rest = unit.params.places().back();
  for (Flat& flat : unit.flats) {
    for (Copy& copy : flat.params) {
      rank_.traffic.let_go(copy.one());
      copy.valid = copy.place == rest;
    }
    std::erase_if(flat.params,
                  [](const Copy& copy) { return !copy.valid && !copy.one().on_disk(); });
  }
  unit.params.drop();
  unit.codings.clear();
  if (whole(index)) attach(unit);  // forward and backward use the resting copy
}

}  // namespace penstock::exec
