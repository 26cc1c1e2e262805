#include "src/engine/model/values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/engine/model/held_units.h"
#include "src/engine/step/backward_end.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/unit_order.h"
#include "src/engine/step/window_agreement.h"

namespace penstock {

std::vector<Shard> Values::shards(bool hidden) {
  state_->check_open("shards");
  std::vector<Shard> shards;
  const bool whole = state_->config.optimizer.value_or(OptimizerConfig{}).layout == "whole";
  for (auto& [name, param, flat, begin] : state_->executor->updates().shard_views()) {
    const bool reshapes = whole && flat.numel() == param.numel();
    shards.push_back({name, param, reshapes ? flat.view(param.sizes()) : flat, begin});
    state_->lent.add(name, shards.back().master);
    for (const tiles::TiledWeight& one : state_->tiled->all()) {
      for (const int unit : one.units) {
        if (state_->unit_names[unit] != name) continue;
        shards.back().param = one.whole;
        shards.back().name = one.name;
        shards.back().begin += state_->tiled->whole_of(unit, name).second;
      }
    }
  }
  if (hidden) state_->lent.hide();
  return shards;
}

void Values::check_may_change(const std::string& what) {
  engine::refuse_in_pass(state_->passes, "optimizer");
  const char* where = nullptr;
  if (engine::in_backward()) {
    where = "in backward";
  } else if (state_->driver->section().has_value()) {
    where = "in forward";
  } else if (state_->driver->holds() &&
             (!state_->executor->table().rests_whole() || state_->wholes->used())) {
    where = "inside gathered() or inference()";
  }
  if (where == nullptr) return;
  throw RuntimeFault(concat("[engine::optimizer] ", what, " was called ", where,
                            ", where the parameters cannot take new values. Call it before or "
                            "after, for example before the forward"));
}

void Values::change_shards(const std::string& what, const std::function<void()>& change) {
  if (state_->closed) {
    throw RuntimeFault(concat("[engine::optimizer] ", what, " was called, but the engine is closed",
                              state_->closed_by));
  }
  state_->check_open("optimizer");
  check_may_change(what);
  exec::Executor& executor = *state_->executor;
  executor.updates().finish();
  state_->border->look_at_params();
  exec::take_every_edit(executor);
  std::exception_ptr raised;
  std::string problem;
  state_->lent.show();
  try {
    change();
    state_->lent.check();
  } catch (const std::exception& error) {
    raised = std::current_exception();
    problem = error.what();
  }
  state_->lent.hide();
  const bool apart =
      num_shards(executor.table().master(), executor.mesh()) > 1 || exec::divides_model(executor);
  if (apart) problem = engine::first_problem(executor, concat("call of ", what), problem);
  // After an error the parameters get the values that the method has written so far, as in torch.
  state_->driver->abandon(true);  // frees working copies, which have the old values
  for (size_t unit = 0; unit < executor.units().size(); ++unit) {
    executor.values().publish(static_cast<int>(unit));
  }
  executor.updates().arrive();
  if (raised) std::rethrow_exception(raised);
  if (!problem.empty()) {
    throw RuntimeFault(concat("[engine::optimizer] ", what, " failed on another rank. ", problem));
  }
}

std::vector<at::Tensor> Values::shard_gradients() {
  state_->check_open("shard_gradients");
  std::vector<at::Tensor> gradients = state_->executor->updates().shard_gradients();
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) state_->lent_gradients.push_back(gradient);
  }
  return gradients;
}

std::vector<std::pair<std::string, at::Tensor>> Values::full(const std::string& role) {
  if (role != "grad" && role != "param") {
    throw ConfigError(concat("[engine::full] unknown role \"", role, "\"; use grad or param"));
  }
  return role == "param" ? weights() : gradients("");
}

at::Tensor Values::gradient(const std::string& param) {
  for (auto& [name, value] : gradients(param)) {
    if (name == param) return value;
  }
  return {};
}

namespace {

// [all ranks] Returns the names of the parameters that got a gradient on any rank in this window.
// If `only` is not empty, considers only this parameter.
std::set<std::string> reached(exec::Executor& executor, const tiles::TiledWeights& tiled,
                              const std::string& only) {
  std::vector<std::string> mine;
  for (size_t unit = 0; unit < executor.units().size(); ++unit) {
    for (const exec::Flat& flat : executor.units()[unit].flats) {
      for (const exec::Slot& slot : flat.slots) {
        if (!slot.touched) continue;
        const std::string name = tiled.whole_of(static_cast<int>(unit), slot.name).first;
        if (only.empty() || name == only) mine.push_back(name);
      }
    }
  }
  std::set<std::string> names;
  for (const std::string& text : engine::share_text(executor, "reached", join(mine, "\n"))) {
    for (std::string& name : split(text, '\n')) names.insert(std::move(name));
  }
  return names;
}

}  // namespace

// [all ranks] Returns the gradients of all parameters that have one. If `only` is not empty,
// considers only this parameter.
std::vector<std::pair<std::string, at::Tensor>> Values::gradients(const std::string& only) {
  state_->check_open("full_grads");
  state_->look_at_gradients(false);
  Core::State::BackwardEnd{*state_}.after_error("full_grads", false);
  take_turn(state_->group->board(), "full_grads", "called full_grads()");
  engine::agree_on_window(*state_->executor, *state_->window, *state_->driver);
  state_->window->check(engine::Call::kFullGrads);
  const double divisor = state_->divisor();
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::map<int, at::Tensor> rows_of = state_->tiled->whole_values(
      true, at::TensorOptions(at::kFloat).device(state_->tiers.computes.where()), &tensors);
  for (size_t unit = 0; unit < state_->executor->units().size(); ++unit) {
    int index = -1;  // index among this rank's flats
    for (const exec::Part& part : state_->executor->units()[unit].parts()) {
      const exec::Flat& flat = *part.flat;
      const std::vector<exec::Slot>& slots = flat.slots;
      index += part.here ? 1 : 0;
      const bool wanted =
          only.empty() || std::any_of(slots.begin(), slots.end(), [&](const exec::Slot& slot) {
            return state_->tiled->whole_of(static_cast<int>(unit), slot.name).first == only;
          });
      if (!flat.trainable || !wanted) continue;
      at::Tensor full;
      if (part.here) full = state_->executor->values().gradient(static_cast<int>(unit), index);
      full = state_->executor->values()
                 .across_stages(flat, full, concat("gradient u", unit, ".", flat.number))
                 .to(state_->tiers.computes.where());
      if (divisor != 1.0) full.div_(divisor);
      for (const exec::Slot& slot : slots) {
        const at::Tensor value = state_->executor->values().whole_of(
            slot, full.narrow(0, slot.offset, slot.numel).view(slot.sizes));
        if (state_->tiled->is_tile(static_cast<int>(unit))) {
          rows_of.at(static_cast<int>(unit)).copy_(value);
        } else {
          tensors.emplace_back(slot.name, value);
        }
      }
    }
  }
  // In torch, a parameter that no loss reached has no gradient, and optimizers do not change it.
  const std::set<std::string> names = reached(*state_->executor, *state_->tiled, only);
  std::erase_if(tensors, [&](const auto& one) { return !names.contains(one.first); });
  return tensors;
}

namespace {

// Takes memory for the largest full flat that arrives, or part of a flat that does not.
mem::Lease room_for_a_flat(exec::Executor& executor, mem::Arena& memory, bool everywhere,
                           int rank) {
  int64_t most = 0;
  for (exec::UnitState& unit : executor.units()) {
    for (const exec::Part& part : unit.parts()) {
      const Mesh mesh = part.flat->placement.mesh(executor.mesh());
      const bool full = everywhere || part.flat->placement.is_first(executor.mesh(), rank);
      const int parts = full ? 1 : num_shards(executor.table().master(), mesh);
      most = std::max(most, part.flat->numel / parts * 4);
    }
  }
  return memory.take(most, mem::Account::kBuffers);
}

// [all ranks] Like room_for_a_flat(), but throws on every rank if one rank has no memory.
mem::Lease agreed_room(exec::Executor& executor, mem::Arena& memory, bool everywhere, int rank) {
  mem::Lease room;
  std::string problem;
  try {
    room = room_for_a_flat(executor, memory, everywhere, rank);
  } catch (const RuntimeFault& error) {
    problem = error.what();
  }
  const Table& table = executor.table();
  std::vector<std::string> problems = {problem};
  if (!table.rests_whole() || num_shards(table.master(), executor.mesh()) > 1 ||
      exec::divides_model(executor)) {
    problems = engine::share_text("read room", problem,
                                  [&](const std::string& label, const std::string& payload) {
                                    return executor.share(label, payload);
                                  });
  }
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty()) continue;
    throw RuntimeFault(concat("[engine::state_dict] rank ", rank, ": ", problems[rank]));
  }
  return room;
}

}  // namespace

// [all ranks] Calls sink(unit, slot, full tensor) on the ranks where values arrive, flat by flat,
// so that only one flat is in memory at a time. Inside gathered(write=True), first writes the
// user's values.
template <class Sink>
void Values::for_each_weight(bool everywhere, const Sink& sink) {
  state_->check_open("state_dict");
  take_turn(state_->group->board(), "weights",
            "began to gather the weights, for example in state_dict()");
  state_->border->look_at_params();
  for (size_t unit = 0; unit < state_->progress.size(); ++unit) {
    if (state_->progress[unit].written == 0) continue;
    state_->wholes->write(static_cast<int>(unit));
    state_->executor->values().refresh(static_cast<int>(unit));
  }
  exec::Executor& executor = *state_->executor;
  // Parts of cut parameters arrive at rank 0 and at the ranks with the other parts, which send them
  // to rank 0.
  const int rank = state_->group->rank();
  const bool wanted = everywhere || rank == 0;
  const mem::Lease room = agreed_room(executor, state_->tiers.on_host(), everywhere, rank);
  for (size_t u = 0; u < executor.units().size(); ++u) {
    const auto unit = static_cast<int>(u);
    int index = -1;  // index among this rank's flats
    for (const exec::Part& one : executor.units()[u].parts()) {
      const exec::Flat& flat = *one.flat;
      const bool arrives = everywhere || flat.placement.is_first(executor.mesh(), rank);
      at::Tensor full;
      if (one.here) {
        char* const to = room.data().host();
        const Dtype dtype = executor.values().parameters(unit, ++index, to, everywhere);
        if (arrives) full = at::from_blob(to, {flat.numel}, device::scalar_type(dtype));
      }
      if (arrives) {
        full =
            executor.values().across_stages(flat, full, concat("weights u", u, ".", flat.number));
      }
      for (const exec::Slot& slot : flat.slots) {
        at::Tensor part;
        if (arrives) part = full.narrow(0, slot.offset, slot.numel).view(slot.sizes);
        const at::Tensor whole = everywhere ? executor.values().whole_of(slot, part)
                                            : executor.values().whole_on_first(slot, part);
        if (wanted) sink(unit, slot, whole);
      }
    }
  }
}

std::vector<std::pair<std::string, at::Tensor>> Values::weights(const WeightsOptions& wanted) {
  state_->check_open("state_dict");
  const bool arrives = wanted.everywhere || state_->group->rank() == 0;
  const auto options = at::TensorOptions(wanted.dtype).device(wanted.device);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::map<int, at::Tensor> rows_of;
  if (arrives) rows_of = state_->tiled->whole_values(false, options, &tensors);
  for_each_weight(
      wanted.everywhere, [&](int unit, const exec::Slot& slot, const at::Tensor& value) {
        if (state_->tiled->is_tile(unit)) {
          rows_of.at(unit).copy_(value);
        } else {
          tensors.emplace_back(slot.name, at::empty(value.sizes(), options).copy_(value));
        }
      });
  return tensors;
}

std::vector<std::pair<std::string, std::vector<int64_t>>> Values::shapes() {
  state_->check_open("state_dict");
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
  std::vector<exec::UnitState>& units = state_->executor->units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (state_->tiled->is_tile(static_cast<int>(unit))) continue;
    for (const exec::Part& part : units[unit].parts()) {
      for (const exec::Slot& slot : part.flat->slots) shapes.emplace_back(slot.name, slot.whole);
    }
  }
  return shapes;
}

void Values::stream(const Take& take) {
  std::string problem;
  const Take keep = [&](const std::string& name, int64_t begin, const at::Tensor& values) {
    try {
      if (problem.empty()) take(name, begin, values);
    } catch (const std::exception& error) {  // kept until all ranks have finished the collectives
      problem = error.what();
    }
  };
  for_each_weight(false, [&](int unit, const exec::Slot& slot, const at::Tensor& value) {
    const auto [name, begin] = state_->tiled->whole_of(unit, slot.name);
    keep(name, begin, value.to(at::kFloat).flatten());
  });
  if (state_->group->rank() == 0) keep("", 0, at::empty({0}));
  problem = engine::first_problem(*state_->executor, "stream", problem);
  if (!problem.empty()) throw RuntimeFault(problem);
}

namespace {

void refuse_other_values(exec::Executor& executor, const std::map<std::string, at::Tensor>& given) {
  std::string mine;
  for (const auto& [name, value] : given) {
    const at::Tensor bytes = value.to(at::kCPU, at::kFloat).contiguous();
    const std::string_view text(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
    mine += concat(name, " ", hash_text(text), "\n");
  }
  const uint64_t hash = hash_text(mine);
  const std::vector<std::string> all =
      executor.share("set_grads", {reinterpret_cast<const char*>(&hash), sizeof(hash)});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    throw ConfigError(
        concat("[engine::set_grads] rank 0 and rank ", rank,
               " were given different gradients. Pass the same values on every rank"));
  }
}

}  // namespace

namespace {

// Checks names and shapes, including those of parameters on other stages.
void check_gradients(std::vector<exec::UnitState>& units,
                     const std::map<std::string, at::Tensor>& given) {
  std::set<std::string> unknown;
  for (const auto& [name, value] : given) unknown.insert(name);
  for (exec::UnitState& unit : units) {
    for (const exec::Part& part : unit.parts()) {
      for (const exec::Slot& slot : part.flat->slots) {
        const auto found = given.find(slot.name);
        if (found == given.end() || !part.flat->trainable) continue;
        unknown.erase(slot.name);
        if (found->second.sizes() == at::IntArrayRef(slot.whole)) continue;
        throw ConfigError(concat("[engine::set_grads] \"", slot.name, "\" has shape ",
                                 found->second.sizes(), ", but its parameter has ",
                                 at::IntArrayRef(slot.whole)));
      }
    }
  }
  if (unknown.empty()) return;
  throw ConfigError(
      concat("[engine::set_grads] \"", *unknown.begin(), "\" is not a trainable parameter"));
}

}  // namespace

void Values::set_closed_by(const std::string& text) { state_->closed_by = text; }

void Values::set_backward_weight(double weight) { state_->backward_weight = weight; }

void Values::set_gradients(const std::vector<std::pair<std::string, at::Tensor>>& gradients) {
  state_->check_open("set_grads");
  state_->look_at_gradients(false);
  Core::State::BackwardEnd{*state_}.after_error("set_grads", false);
  take_turn(state_->group->board(), "set_grads", "called set_grads()");
  engine::agree_on_window(*state_->executor, *state_->window, *state_->driver);
  state_->window->check(engine::Call::kSetGrads);
  std::map<std::string, at::Tensor> by_name(gradients.begin(), gradients.end());
  state_->tiled->split_rows(by_name);
  std::vector<exec::UnitState>& units = state_->executor->units();
  const auto for_each = [&](const auto& action) {
    for (size_t unit = 0; unit < units.size(); ++unit) {
      for (size_t flat = 0; flat < units[unit].flats.size(); ++flat) {
        const exec::Flat& one = units[unit].flats[flat];
        for (size_t slot = 0; slot < one.slots.size() && one.trainable; ++slot) {
          const auto given = by_name.find(one.slots[slot].name);
          if (given != by_name.end()) action(unit, flat, slot, given->second);
        }
      }
    }
  };
  // Everything is checked before anything is written.
  check_gradients(units, by_name);
  refuse_other_values(*state_->executor, by_name);
  std::string bad;
  for_each([&](size_t unit, size_t flat, size_t index, const at::Tensor& value) {
    if (bad.empty() && !at::isfinite(value).all().item<bool>()) {
      bad = concat("parameter \"", units[unit].flats[flat].slots[index].name,
                   "\", which was given to set_grads()");
    }
    const exec::Slot& slot = units[unit].flats[flat].slots[index];
    const at::Tensor part = state_->executor->values().part_of(slot, value.to(at::kFloat));
    state_->executor->gradients().set(static_cast<int>(unit), static_cast<int>(flat),
                                      static_cast<int>(index), part, state_->divisor());
  });
  state_->border->show_gradients();
  if (!state_->border->any_bad()) state_->window->take_blamed();
  if (!bad.empty()) state_->window->blame(bad);
}

namespace {

[[noreturn]] void refuse_coded(const std::string& unit) {
  throw RuntimeFault(concat(
      "[engine::gathered] unit \"", unit,
      "\" has values that a lossy wire has rounded for the forward or backward in progress "
      "(comm.codec or table.wire.param). Call gathered(write=True) before the forward or after the "
      "backward"));
}

}  // namespace

void Values::gather(const std::vector<int>& units, bool write) {
  state_->check_open("gathered");
  state_->border->look_at_params();
  exec::Executor& executor = *state_->executor;
  if (!units.empty() && state_->moves_params) {
    take_turn(state_->group->board(), "gathered",
              state_->passes > 0 ? "called weights()" : "called gathered()");
  }
  if (write) engine::refuse_in_pass(state_->passes, "gathered");
  if (write) engine::claim_writes(executor, units);
  // [Note: Deltas] A forward or backward computes with the published values, so none may be open.
  if (write && executor.table().keeps_base() && !state_->driver->section()) {
    exec::publish_exactly(executor, units);
  }
  engine::BroughtUnits brought(executor.params(), state_->driver->section().has_value());
  try {
    for (const int unit : units) {
      if (write && brought.keeps_rounded(unit)) refuse_coded(executor.units()[unit].name);
      brought.bring(unit);
      state_->wholes->show(unit);
    }
    state_->tiled->gather(units, state_->tiers.device);
  } catch (const RuntimeFault&) {  // for example, too little memory: undo everything
    for (const int unit : units) {
      if (state_->driver->held(unit) == 0) state_->wholes->hide(unit);
    }
    brought.undo();
    throw;
  }
  state_->driver->hold(units);
  for (const int unit : units) {
    ++state_->progress[unit].gathered;
    state_->progress[unit].written += write ? 1 : 0;
  }
}

void Values::release(const std::vector<int>& units, bool write) {
  if (state_->closed) return;  // close() inside the block has given the model back
  const char* did = state_->passes > 0 ? "went on with weights()" : "left gathered()";
  if (!units.empty() && state_->moves_params) take_turn(state_->group->board(), "release", did);
  try {
    state_->border->look_at_params();
    for (const int unit : units) {
      if (write || state_->progress[unit].gathered == 1) state_->tiled->release({unit}, write);
    }
    for (const int unit : units) {
      if (!write) continue;
      state_->wholes->write(unit);
      state_->executor->values().refresh(unit);
    }
    if (!write) refuse_edits(units);
  } catch (...) {
    let_go_of(units, write);
    throw;
  }
  let_go_of(units, write);
}

void refine_masters(Values& values, const std::vector<std::pair<std::string, at::Tensor>>& loaded) {
  auto& state = *values.state_;
  state.check_open("load_state_dict");
  const at::NoGradGuard no_grad;
  exec::Executor& executor = *state.executor;
  const std::vector<std::string> any = executor.share("loaded values", loaded.empty() ? "0" : "1");
  if (std::count(any.begin(), any.end(), "1") == 0) return;
  std::map<std::string, at::Tensor> by_name(loaded.begin(), loaded.end());
  state.tiled->split_rows(by_name);
  for (size_t unit = 0; unit < executor.units().size(); ++unit) {
    for (exec::Flat& flat : executor.units()[unit].flats) {
      if (!flat.trainable || !executor.table().has_master(flat.dtype)) continue;
      const at::Tensor fp32 = at::full({flat.numel}, std::numeric_limits<float>::quiet_NaN(),
                                       at::TensorOptions(at::kFloat));
      for (const exec::Slot& slot : flat.slots) {
        const auto given = by_name.find(slot.name);
        if (given == by_name.end()) continue;
        const at::Tensor whole = given->second.to(at::kCPU, at::kFloat);
        fp32.narrow(0, slot.offset, slot.numel)
            .copy_(executor.values().part_of(slot, whole).flatten());
      }
      executor.values().refine(flat, fp32, concat("loaded u", unit, ".", flat.number));
    }
  }
}

// Releases units. When the last gathered() block of a unit ends, its parameters are this rank's
// parts again.
void Values::let_go_of(const std::vector<int>& units, bool write) {
  for (const int unit : units) {
    if (state_->driver->held(unit) == 1) state_->border->leave_views(unit);
    state_->progress[unit].written -= write ? 1 : 0;
    if (--state_->progress[unit].gathered == 0) state_->wholes->hide(unit);
  }
  state_->driver->let_go(units);
}

// [all ranks] Throws if users edited gathered parameters without write=True. Each rank compares
// only its own shard. The ranks then share the results, so that all of them throw.
void Values::refuse_edits(const std::vector<int>& units) {
  const bool rests_whole = state_->executor->table().rests_whole();
  if (rests_whole && !state_->wholes->used()) return;
  std::string mine;
  for (const int unit : units) {
    // If an outer block holds the unit, too, the outer block makes the check.
    if (mine.empty() && state_->progress[unit].gathered == 1) mine = state_->wholes->edited(unit);
    if (!mine.empty() || rests_whole || state_->driver->held(unit) != 1) continue;
    mine = state_->border->edited(unit, true);
  }
  if (mine.empty()) mine = state_->executor->values().resolve_doubts();
  const auto share = [this](const std::string& label, const std::string& text) {
    return state_->executor->share(label, text);
  };
  for (const std::string& edited : engine::share_text("edits", mine, share)) {
    engine::OutsideEdits::refuse_edit(edited, "inside gathered() or inference()");
  }
}

void Values::let_go(const std::vector<int>& units, bool write) {
  if (state_->closed) return;
  for (const int unit : units) {
    if (state_->progress[unit].gathered == 1) state_->tiled->release({unit}, false);
  }
  let_go_of(units, write);
}

void Values::set_to_itself(const std::string& param) {
  for (exec::UnitState& unit : state_->executor->units()) {
    for (exec::Flat& flat : unit.flats) {
      for (exec::Slot& slot : flat.slots) {
        const bool own = slot.param.storage().is_alias_of(slot.window);
        if (slot.name == param && own) ++slot.version;
      }
    }
  }
  // The parameter has a new accumulator. During a backward, gradients still arrive at the old
  // accumulator.
  if (engine::in_backward()) return;
  for (engine::GradientHook& hook : state_->hooks) hook.follow();
}

std::vector<int> Values::units_of(const std::vector<std::string>& params) const {
  std::vector<int> units;
  for (const tiles::TiledWeight& one : state_->tiled->all()) {
    if (std::find(params.begin(), params.end(), one.name) != params.end()) {
      units.insert(units.end(), one.units.begin(), one.units.end());
    }
  }
  for (size_t unit = 0; unit < state_->executor->units().size(); ++unit) {
    bool wanted = params.empty();
    for (const exec::Part& part : state_->executor->units()[unit].parts()) {
      for (const exec::Slot& slot : part.flat->slots) {
        wanted |= std::find(params.begin(), params.end(), slot.name) != params.end();
      }
    }
    if (wanted) units.push_back(static_cast<int>(unit));
  }
  return units;
}

}  // namespace penstock
