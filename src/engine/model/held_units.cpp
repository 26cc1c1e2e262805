#include "src/engine/model/held_units.h"

#include <algorithm>
#include <string>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/engine/model/values.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/unit_order.h"
#include "src/engine/step/window_agreement.h"
#include "src/mem/available_memory.h"

namespace penstock {

namespace {

// Returns the bytes of the copies that are missing.
int64_t missing_bytes(const exec::Executor& executor, const exec::Params& params,
                      const std::vector<int>& units) {
  int64_t bytes = 0;
  for (const int unit : units) {
    if (params.whole(unit)) continue;
    for (const exec::Flat& flat : executor.units()[static_cast<size_t>(unit)].flats) {
      bytes += flat.numel * flat.element_bytes();
    }
  }
  return bytes;
}

}  // namespace

namespace engine {

void refuse_in_pass(int passes, const char* call) {
  if (passes == 0) return;
  throw RuntimeFault(concat("[engine::", call, "] the weights were about to change (", call,
                            ") while weights() was not read to its end: the rest of it would have "
                            "a different version. Read it to the end before, or close() the "
                            "iterator"));
}

FrozenParams::FrozenParams(const ModelTree& tree, const Config& config) {
  for (const ParamInfo& one : tree.params) {
    if (config.inference && one.param.requires_grad()) trained_.push_back(one.param);
  }
  set_requires_grad(false);
}

FrozenParams::~FrozenParams() { set_requires_grad(true); }

void FrozenParams::set_requires_grad(bool as_before) {
  for (const at::Tensor& param : trained_) param.set_requires_grad(as_before);
}

void claim_writes(exec::Executor& executor, const std::vector<int>& units) {
  std::vector<exec::Flat*> flats;
  for (const int unit : units) {
    for (exec::Flat& flat : executor.units()[static_cast<size_t>(unit)].flats) {
      if (flat.in_files) flats.push_back(&flat);
    }
  }
  if (flats.empty()) return;
  std::string problem;
  try {
    for (exec::Flat* flat : flats) executor.traffic().claim_write(flat->rest().one());
  } catch (const RuntimeFault& error) {
    problem = error.what();
  }
  const std::vector<std::string> all = share_text(executor, "room for edits", problem);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) throw RuntimeFault(concat("rank ", rank, ": ", all[rank]));
  }
}

void BroughtUnits::undo() {
  for (const int unit : brought_) params_.drop(unit);
}

bool BroughtUnits::keeps_rounded(int unit) const { return in_section_ && params_.coded(unit); }

void BroughtUnits::bring(int unit) {
  if (!params_.whole(unit)) brought_.push_back(unit);
  keeps_rounded(unit) ? params_.require(unit) : params_.require_exact(unit);
}

}  // namespace engine

bool hold(Values& values, const std::vector<int>& units) {
  auto& state = *values.state_;
  state.check_open("inference");
  state.border->look_at_params();
  exec::Executor& executor = *state.executor;
  if (state.moves_params) take_turn(state.group->board(), "inference", "called inference()");
  const int64_t bytes = missing_bytes(executor, executor.params(), units);
  int64_t room = std::min(state.tiers.device.room(), state.tiers.memory.room());
  room = std::min(room, state.tiers.computes.free_bytes().value_or(mem::free_host_bytes()));
  const std::vector<std::string> answers =
      executor.share("room for inference", bytes <= room / 5 * 4 ? "1" : "0");
  if (std::count(answers.begin(), answers.end(), "1") < executor.mesh().world()) return false;
  engine::BroughtUnits brought(executor.params(), state.driver->section().has_value());
  try {
    for (const int unit : units) brought.bring(unit);
  } catch (const RuntimeFault&) {
    brought.undo();
    throw;
  }
  state.driver->hold(units);
  return true;
}

void Values::end_held(const std::vector<int>& units) {
  for (const int unit : units) {
    if (state_->driver->held(unit) == 1) state_->border->leave_views(unit);
  }
  state_->driver->let_go(units);
  state_->tiers.device.trim();
}

void let_go_of_held(Values& values, const std::vector<int>& units, const std::string& error) {
  auto& state = *values.state_;
  if (state.closed) return;  // close() has given the model back
  try {
    state.border->look_at_params();
    if (state.moves_params) {
      take_turn(state.group->board(), "end of inference", "left inference()");
      const std::string problem = engine::first_problem(*state.executor, "end of inference", error);
      if (!problem.empty()) {
        throw RuntimeFault(
            concat("[engine::inference] ", problem, ". This error ended inference() on all ranks"));
      }
    }
    values.refuse_edits(units);
  } catch (...) {
    values.end_held(units);
    throw;
  }
  values.end_held(units);
}

void abandon_held(Values& values, const std::vector<int>& units, const std::string& error) {
  auto& state = *values.state_;
  if (state.closed) return;
  leave_turn(state.group->board(), concat("left inference() because of an error: ", error), true);
  values.end_held(units);
}

void begin_pass(Values& values) { ++values.state_->passes; }

void end_pass(Values& values) { --values.state_->passes; }

void keep_views(Values& values, const std::vector<int>& units) {
  auto& state = *values.state_;
  if (state.executor->table().rests_whole()) return;  // their memory stays
  for (const int unit : units) state.border->keep_views(unit);
}

std::map<std::string, int> first_units(const Values& values) {
  const auto& state = *values.state_;
  std::map<std::string, int> found;
  for (const tiles::TiledWeight& one : state.tiled->all()) {
    found.emplace(one.name, one.units.front());
  }
  std::vector<exec::UnitState>& units = values.state_->executor->units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (const exec::Part& part : units[unit].parts()) {
      for (const exec::Slot& slot : part.flat->slots) {
        found.emplace(slot.name, static_cast<int>(unit));
      }
    }
  }
  return found;
}

}  // namespace penstock
