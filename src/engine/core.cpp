#include "penstock/core.h"

#include <ATen/ops/full_like.h>

#include <algorithm>
#include <map>
#include <utility>

#include "penstock/error.h"
#include "penstock/tiling.h"
#include "src/base/text.h"
#include "src/engine/state.h"

namespace penstock {

Core::Core(const ModelTree& tree, const Config& config, std::shared_ptr<Group> group,
           bool external_optimizer)
    : state_(std::make_shared<State>(tree, config, std::move(group), external_optimizer)) {
  state_->install_hooks();
}

Core::~Core() = default;

const std::vector<std::string>& Core::unit_modules() const { return state_->unit_modules; }

bool Core::needs_unit_events() const { return state_->unit_events; }

std::vector<int> Core::recomputed_units() const {
  std::vector<int> units;
  for (size_t unit = 0; unit < state_->model.units.size(); ++unit) {
    if (state_->model.units[unit].recomputed) units.push_back(static_cast<int>(unit));
  }
  return units;
}

bool Core::moves_activations() const { return state_->executor->table().moves_activations(); }

void Core::unit_again(int unit) { state_->unit_again(unit); }

std::function<at::Tensor()> Core::save_input(int unit, const at::Tensor& input) {
  return state_->executor->activations().save(unit, input);
}

int64_t Core::saved_bytes() const { return state_->executor->activations().live_bytes(); }

void Core::unit_begin(int unit, bool grad_enabled) {
  if (unit == 0) return state_->forward_begin(grad_enabled);
  state_->unit_begin(unit);
}

void Core::unit_end(int unit, const std::vector<at::Tensor>& outputs) {
  if (unit == 0) return state_->forward_end(outputs);
  state_->unit_end(unit, outputs);
}

void Core::forward_failed(const std::string& error) { state_->forward_failed(error); }

at::Tensor Core::start_backward(const at::Tensor& loss, const at::Tensor& gradient) {
  state_->check_open("backward");
  state_->window->on(engine::Call::kBackward);
  state_->fault = nullptr;
  const double scale = state_->loss_scale.value();
  if (scale == 1.0 || (!gradient.defined() && loss.numel() != 1)) return gradient;
  return gradient.defined() ? gradient.mul(scale) : at::full_like(loss, scale);
}

void Core::backward_failed(const std::string& error) {
  state_->failed("backward", error);
  if (state_->fault) std::rethrow_exception(std::exchange(state_->fault, nullptr));
}

bool Core::window_complete(bool force) const {
  state_->check_open("step");
  state_->window->check(engine::Call::kStep);
  return force || state_->window->complete();
}

bool Core::step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external) {
  return state_->step(groups, external);
}

double Core::grad_norm() const { return state_->executor->updates().grad_norm(); }
int64_t Core::steps() const { return state_->steps; }
double Core::loss_scale() const { return state_->loss_scale.value(); }
int64_t Core::skipped_steps() const { return state_->skipped; }
std::string Core::overflow() const { return state_->overflow; }

void Core::set_groups(const std::vector<int>& group_of_param) {
  for (exec::UnitState& unit : state_->executor->units()) {
    for (exec::Flat& flat : unit.flats) {
      for (exec::Slot& slot : flat.slots) slot.group = group_of_param.at(slot.index);
    }
  }
}

std::vector<Shard> Core::shards() {
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

std::vector<at::Tensor> Core::shard_gradients() {
  state_->check_open("shard_gradients");
  return state_->executor->updates().shard_gradients();
}

std::vector<std::pair<std::string, at::Tensor>> Core::full(const std::string& role) {
  if (role != "grad" && role != "param") {
    throw ConfigError(concat("[engine::full] no role \"", role, "\": grad or param"));
  }
  state_->check_open(role == "grad" ? "full_grads" : "state_dict");
  const bool grad = role == "grad";
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

void Core::set_gradients(const std::vector<std::pair<std::string, at::Tensor>>& gradients) {
  state_->check_open("set_grads");
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
}

std::vector<std::string> Core::tiled() const {
  std::vector<std::string> names;
  for (const tiles::TiledWeight& one : state_->tiled->all()) names.push_back(one.name);
  return names;
}

bool Core::is_tile(int unit) const { return state_->tiled->is_tile(unit); }

void Core::gather(const std::vector<int>& units) {
  state_->check_open("gathered");
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
}

void Core::release(const std::vector<int>& units, bool write) {
  if (state_->closed) return;  // inside: the parameters are the model's own again
  for (const int unit : units) {
    if (!write || state_->executor->params().whole(unit)) continue;
    throw RuntimeFault(concat(
        "[engine::gathered] a forward or another gathered() inside gathered(write=True) let go of ",
        state_->unit_names[unit], ": what was written to it is lost. Leave the block before"));
  }
  state_->tiled->release(units, write);
  for (const int unit : units) {
    if (write) state_->executor->values().refresh(unit);
    state_->executor->params().drop(unit);
  }
}

std::vector<int> Core::units_of(const std::vector<std::string>& params) const {
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

Tiles::Tiles(const Core& core, const std::string& param)
    : Tiles({core.state_, &*core.state_->tiled}, param, core.state_->config.tiling.loss_tokens) {}

void Core::close(bool gather) { state_->close(gather); }

}  // namespace penstock
