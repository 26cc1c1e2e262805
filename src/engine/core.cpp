#include "penstock/core.h"

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/state.h"
#include "src/engine/strategy.h"

namespace penstock {

Core::Core(const ModelTree& tree, const Config& config, std::shared_ptr<Group> group,
           bool external_optimizer)
    : state_(std::make_shared<State>(tree, config, std::move(group), external_optimizer)) {
  state_->install_hooks();
}

Core::~Core() = default;

const std::vector<std::string>& Core::unit_modules() const { return state_->unit_modules; }

bool Core::needs_unit_events() const { return state_->moves_params; }

void Core::unit_begin(int unit, bool grad_enabled) {
  if (unit == 0) return state_->forward_begin(grad_enabled);
  state_->unit_begin(unit);
}

void Core::unit_end(int unit, const std::vector<at::Tensor>& outputs) {
  if (unit == 0) return state_->forward_end(outputs);
  state_->unit_end(unit, outputs);
}

void Core::forward_failed(const std::string& error) { state_->forward_failed(error); }

void Core::check_backward() const {
  if (state_->closed) throw RuntimeFault("[engine::backward] the engine is closed");
  if (state_->fault) std::rethrow_exception(std::exchange(state_->fault, nullptr));
  if (state_->forwards > 0) return;
  throw RuntimeFault(
      "[engine::backward] backward() without a forward since the last step: call the engine on a "
      "batch first, with gradients enabled");
}

bool Core::window_complete(bool force) const {
  if (state_->closed) throw RuntimeFault("[engine::step] the engine is closed");
  if (state_->seen == 0 && !state_->backward_armed) {
    throw RuntimeFault(
        "[engine::step] step() without a backward since the last step: call engine.backward(loss) "
        "first");
  }
  return force || state_->seen >= state_->config.batch.accumulate;
}

void Core::step(const std::vector<GroupSettings>& groups, const std::function<void()>& external) {
  state_->step(groups, external);
}

double Core::grad_norm() const { return state_->executor->grad_norm(); }
int64_t Core::steps() const { return state_->steps; }

std::vector<Shard> Core::shards() {
  std::vector<Shard> shards;
  for (auto& [name, param, master] : state_->executor->shard_views()) {
    shards.push_back({name, param, master});
  }
  return shards;
}

std::vector<at::Tensor> Core::shard_gradients() { return state_->executor->shard_gradients(); }

std::vector<std::pair<std::string, at::Tensor>> Core::full(const std::string& role) {
  if (role != "grad" && role != "param") {
    throw ConfigError(concat("[engine::full] no role \"", role, "\": grad or param"));
  }
  const bool grad = role == "grad";
  if (grad && state_->seen == 0) {
    throw RuntimeFault(
        "[engine::full_grads] there are no gradients: call it after backward() and "
        "before step()");
  }
  const double divisor =
      grad ? static_cast<double>(std::min(state_->seen, state_->config.batch.accumulate)) : 1.0;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (size_t unit = 0; unit < state_->executor->units().size(); ++unit) {
    const std::vector<exec::Flat>& flats = state_->executor->units()[unit].flats;
    for (size_t flat = 0; flat < flats.size(); ++flat) {
      if (grad && !flats[flat].trainable) continue;
      at::Tensor full = state_->executor->full_flat(static_cast<int>(unit), static_cast<int>(flat),
                                                    grad ? Role::kGrad : Role::kParam);
      if (divisor != 1.0) full.div_(divisor);
      for (const exec::Slot& slot : flats[flat].slots) {
        tensors.emplace_back(slot.name,
                             full.narrow(0, slot.offset, slot.numel).view(slot.param.sizes()));
      }
    }
  }
  return tensors;
}

void Core::gather(const std::vector<int>& units) {
  for (const int unit : units) {
    if (!state_->executor->full(unit)) {
      state_->executor->run(state_->executor->move_to(unit, Phase::kForward));
    }
    state_->executor->require(unit);
  }
}

void Core::release(const std::vector<int>& units, bool write) {
  for (const int unit : units) {
    if (write) state_->executor->refresh(unit);
    state_->executor->drop(unit);
  }
}

std::vector<int> Core::units_of(const std::vector<std::string>& params) const {
  std::vector<int> units;
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

void Core::close() { state_->close(true); }

}  // namespace penstock
