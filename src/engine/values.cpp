#include "penstock/values.h"

#include <algorithm>
#include <map>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/state.h"

namespace penstock {

std::vector<Shard> Values::shards() {
  state_->check_open("shards");
  std::vector<Shard> shards;
  for (auto& [name, param, master] : state_->executor->updates().shard_views()) {
    shards.push_back({name, param, master});
    for (const tiles::TiledWeight& one : state_->tiled->all()) {
      for (const int unit : one.units) {
        if (state_->unit_names[unit] == name) shards.back().param = one.whole;
      }
    }
  }
  return shards;
}

std::vector<at::Tensor> Values::shard_gradients() {
  state_->check_open("shard_gradients");
  return state_->executor->updates().shard_gradients();
}

std::vector<std::pair<std::string, at::Tensor>> Values::full(const std::string& role) {
  if (role != "grad" && role != "param") {
    throw ConfigError(concat("[engine::full] no role \"", role, "\": grad or param"));
  }
  state_->check_open(role == "grad" ? "full_grads" : "state_dict");
  const bool grad = role == "grad";
  if (grad) state_->look_at_gradients(false);
  if (!grad) state_->border->look_at_params();
  if (grad) state_->window->check(engine::Call::kFullGrads);
  const double divisor = grad ? state_->divisor() : 1.0;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::map<int, at::Tensor> rows_of = state_->tiled->whole_values(grad, &tensors);
  for (size_t unit = 0; unit < state_->executor->units().size(); ++unit) {
    const std::vector<exec::Flat>& flats = state_->executor->units()[unit].flats;
    for (size_t flat = 0; flat < flats.size(); ++flat) {
      if (grad && !flats[flat].trainable) continue;
      const auto u = static_cast<int>(unit), f = static_cast<int>(flat);
      exec::Values& values = state_->executor->values();
      at::Tensor full = grad ? values.gradient(u, f) : values.parameters(u, f);
      if (divisor != 1.0) full.div_(divisor);
      for (const exec::Slot& slot : flats[flat].slots) {
        const at::Tensor value = full.narrow(0, slot.offset, slot.numel).view(slot.param.sizes());
        if (state_->tiled->is_tile(static_cast<int>(unit))) {
          rows_of.at(static_cast<int>(unit)).copy_(value);
        } else {
          tensors.emplace_back(slot.name, value);
        }
      }
    }
  }
  return tensors;
}

void Values::set_gradients(const std::vector<std::pair<std::string, at::Tensor>>& gradients) {
  state_->check_open("set_grads");
  state_->look_at_gradients(false);
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
  size_t known = 0;
  for_each([&](size_t unit, size_t flat, size_t index, const at::Tensor& value) {
    const exec::Slot& slot = units[unit].flats[flat].slots[index];
    ++known;
    if (value.sizes() == slot.param.sizes()) return;
    throw ConfigError(concat("[engine::set_grads] \"", slot.name, "\" has shape ", value.sizes(),
                             ", its parameter ", slot.param.sizes()));
  });
  if (known != by_name.size()) {
    throw ConfigError("[engine::set_grads] a name is no parameter that trains");
  }
  for_each([&](size_t unit, size_t flat, size_t index, const at::Tensor& value) {
    state_->executor->gradients().set(static_cast<int>(unit), static_cast<int>(flat),
                                      static_cast<int>(index), value.to(at::kFloat),
                                      state_->divisor());
  });
  state_->border->show_gradients();
  if (!state_->border->any_bad()) state_->window->take_blamed();
}

void Values::gather(const std::vector<int>& units) {
  state_->check_open("gathered");
  state_->border->look_at_params();
  exec::Executor& executor = *state_->executor;
  std::vector<int> brought;
  try {
    for (const int unit : units) {
      if (!executor.params().whole(unit)) brought.push_back(unit);
      executor.params().require(unit);
    }
    state_->tiled->gather(units, state_->tiers.device);
  } catch (const RuntimeFault&) {  // no memory, say: as if nobody had asked
    for (const int unit : brought) executor.params().drop(unit);
    throw;
  }
  state_->driver->hold(units);
}

void Values::release(const std::vector<int>& units, bool write) {
  if (state_->closed) return;  // inside: the parameters are the model's own again
  try {
    state_->border->look_at_params();
    state_->tiled->release(units, write);
    for (const int unit : units) {
      if (write) state_->executor->values().refresh(unit);
    }
    if (!write) refuse_edits(units);
  } catch (...) {
    state_->driver->let_go(units);
    throw;
  }
  state_->driver->let_go(units);
}

// On every rank alike: one compares only its own part.
void Values::refuse_edits(const std::vector<int>& units) {
  if (state_->executor->table().rests_whole()) return;
  std::string mine;
  for (const int unit : units) {
    // Inside another gathered() that one sees to it.
    if (mine.empty() && state_->driver->held(unit) == 1) mine = state_->border->edited(unit, true);
  }
  for (const std::string& edited : state_->share_text("edits", mine)) {
    engine::Border::refuse_edit(edited, "inside engine.gathered()");
  }
}

void Values::let_go(const std::vector<int>& units) {
  if (state_->closed) return;
  state_->tiled->release(units, false);
  state_->driver->let_go(units);
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
    for (const exec::Flat& flat : state_->executor->units()[unit].flats) {
      for (const exec::Slot& slot : flat.slots) {
        wanted |= std::find(params.begin(), params.end(), slot.name) != params.end();
      }
    }
    if (wanted) units.push_back(static_cast<int>(unit));
  }
  return units;
}

}  // namespace penstock
