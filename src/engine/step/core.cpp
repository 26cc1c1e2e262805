#include "penstock/core.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/engine/model/exposed_tensors.h"
#include "src/engine/model/held_units.h"
#include "src/engine/step/backward_end.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/planning.h"
#include "src/engine/step/window_agreement.h"
#include "src/engine/watch/observer.h"
#include "src/plan/strategy.h"
#include "src/tiles/tiling.h"

namespace penstock {

namespace {

// Throws RuntimeFault if the engine is for inference.
void check_trains(const Config& config, const char* call) {
  if (!config.inference) return;
  throw RuntimeFault(concat("[engine::", call, "] ", call,
                            "() was called, but the engine is for inference (config key "
                            "\"inference\"). Train with an engine without this key"));
}

}  // namespace

Core::Core(const ModelTree& tree, const Config& config, std::shared_ptr<Group> group,
           bool external_optimizer, std::shared_ptr<Group> nodes) {
  auto frozen = std::make_unique<engine::FrozenParams>(tree, config);
  state_ =
      std::make_shared<State>(tree, config, std::move(group), external_optimizer, std::move(nodes));
  state_->frozen = std::move(frozen);
  state_->install_hooks();
  State::Observer{*state_}.describe();
}

Core::~Core() = default;

const Config& Core::config() const { return state_->config; }

std::vector<UnitInfo> Core::units() const {
  std::vector<UnitInfo> units;
  for (size_t unit = 0; unit < state_->model.units.size(); ++unit) {
    units.push_back({state_->unit_modules[unit], state_->tiled->is_tile(static_cast<int>(unit)),
                     state_->model.units[unit].recomputed,
                     unit > 0 && state_->model.units[unit].flats.empty()});
  }
  return units;
}

bool Core::needs_unit_events() const { return state_->unit_events; }

void Core::unit_begin(int unit, bool grad_enabled) {
  if (unit > 0) return state_->unit_begin(unit);
  state_->forward_begin(grad_enabled);
  if (state_->frozen) state_->frozen->set_requires_grad(!grad_enabled);
}

void Core::unit_end(int unit, const std::vector<at::Tensor>& outputs) {
  if (unit > 0) return state_->unit_end(unit, outputs);
  if (state_->frozen) state_->frozen->set_requires_grad(false);
  state_->forward_end(outputs);
  // Between forwards, other models of the process may use the memory of the units (a policy beside
  // its reference model). On the host, buffers would have to be mapped again for each forward.
  if (state_->frozen && !state_->tiers.computes.is_host()) state_->tiers.device.trim();
}

void Core::forward_failed(const std::string& error) {
  if (state_->frozen) state_->frozen->set_requires_grad(false);
  state_->forward_failed(error);
}

bool Core::any_forward(bool mine) {
  state_->check_open("forward");
  if (!state_->model_ranks.stages && !engine::forwards_meet(*state_->executor)) return mine;
  const std::string all = engine::say_each(*state_->executor, "any forward", mine);
  const bool any = all.find('1') != std::string::npos, ended = all.find('0') != std::string::npos;
  // If a rank has no more batches, it runs the plan of a forward. Until the end of step one, this
  // plan does not have the tiles.
  if (any && ended && state_->moves_params && !state_->order->done() &&
      !state_->tiled->all().empty()) {
    throw RuntimeFault(
        "[engine::forward] ranks ended generate() or uneven() after different numbers of forwards. "
        "With \"tiling\" this works only after the first training step: run that step first, or "
        "run the same number of forwards on every rank");
  }
  return any;
}

// Adds up the values in rank order, so the result has the same bits on every rank.
double Core::mean(double mine, bool counts) const {
  state_->check_open("mean");
  const std::array<double, 2> own = {counts ? mine : 0.0, counts ? 1.0 : 0.0};
  double sum = 0.0, count = 0.0;
  const std::vector<std::string> all =
      state_->executor->share("mean", {reinterpret_cast<const char*>(own.data()), sizeof(own)});
  for (const std::string& one : all) {
    std::array<double, 2> theirs{};
    std::memcpy(theirs.data(), one.data(), sizeof(theirs));
    sum += theirs[0];
    count += theirs[1];
  }
  if (state_->outer) {
    const std::vector<double> all = state_->outer->sum("mean", {sum, count});
    sum = all[0];
    count = all[1];
  }
  return count > 0.0 ? sum / count : 0.0;
}

void Core::relearn() {
  if (state_->window->armed()) return;
  state_->order->restart(state_->model);
  if (state_->exchanges) state_->exchanges->restart();
}

void Core::resume_backward() {
  state_->check_open("backward");
  const auto inside = state_->calling.within("backward");
  State::BackwardEnd{*state_}.after_error("backward", true);
  state_->window->on(engine::Call::kBackward);
  // An exception that was kept from an earlier backward is now obsolete.
  state_->fault = nullptr;
  state_->model_ranks.take_fault();
  state_->seen_before = state_->window->seen();
  if (state_->window->armed()) return;
  state_->look_at_gradients(false);
  state_->border->hide_gradients();
}

at::Tensor Core::start_backward(const at::Tensor& loss, const at::Tensor& gradient) {
  check_trains(state_->config, "backward");
  resume_backward();
  if (!gradient.defined() && loss.numel() == 1) state_->monitor->saw(loss);
  const double scale = state_->loss_scale.value();
  if (scale == 1.0 || (!gradient.defined() && loss.numel() != 1)) return gradient;
  // A scale above the range of fp16 becomes infinite. The step is then skipped, and the scale is
  // halved.
  const at::Tensor factor = at::scalar_tensor(scale, at::TensorOptions(at::kFloat));
  const at::Tensor start = gradient.defined() ? gradient : at::ones_like(loss);
  return start.mul(factor.to(start.scalar_type()));
}

void Core::backward_failed(const std::string& error) {
  state_->failed("backward", error);
  if (state_->fault) std::rethrow_exception(std::exchange(state_->fault, nullptr));
  if (const std::exception_ptr lost = state_->model_ranks.take_fault())
    std::rethrow_exception(lost);
}

bool Core::window_complete(bool force) {
  state_->check_open("step");
  check_trains(state_->config, "step");
  const auto inside = state_->calling.within("step");
  state_->look_at_gradients(false);
  State::BackwardEnd{*state_}.after_error("step", false);
  state_->window->check(engine::Call::kStep);
  return force || state_->window->complete();
}

bool Core::step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external,
                const std::string& options) {
  const auto inside = state_->calling.within("step");
  engine::refuse_in_pass(state_->passes, "step");
  show(state_->group->board(), "update");  // for `penstock status`
  take_turn(state_->group->board(), exec::Norm::kLabel,
            engine::at_this_point("called step()", *state_->window, state_->steps));
  // The optimizer's gradients are views of memory that the step frees, so they are taken back.
  const std::function<void()> lending = [&] {
    state_->lent.show();
    try {
      external();
    } catch (...) {
      state_->lent.hide();
      engine::take_back(state_->lent_gradients);
      throw;
    }
    state_->lent.hide();
    engine::take_back(state_->lent_gradients);
    state_->lent.check();
  };
  const bool applied = state_->step(groups, external ? lending : external, options);
  State::Planning{*state_}.follow_wires();
  show(state_->group->board(), "the caller's code, after step");
  return applied;
}

void Core::zero_grad(bool set_to_none) {
  state_->check_open("zero_grad");
  const auto inside = state_->calling.within("zero_grad()");
  if (state_->window->armed() && state_->raised == State::Raised::kNone) return;
  state_->drop_gradients();
  state_->executor->gradients().leave_zeros(!set_to_none);
  state_->border->show_gradients();
}

int64_t Core::steps() const { return state_->steps; }

std::string Core::plan_text(const std::string& section) const {
  if (section == "window") {
    if (!state_->model_ranks.window) {
      throw ConfigError(
          "[engine::plan_text] \"window\" needs a pipeline (mesh.pipeline), because no other mesh "
          "has a plan of the window");
    }
    return State::Planning{*state_}.window_text();
  }
  return state_->driver->plan({section_named(section)}).text();
}

void Core::set_plan_text(const std::string& section, const std::string& text) {
  if (state_->model_ranks.stages) {
    throw ConfigError(
        "[engine::set_plan_text] this call does not work in a pipeline: its stages run the plans "
        "of a window's actions, not the plan of a section");
  }
  state_->driver->set_plan({section_named(section)}, parse_plan(text));
}

void Core::set_groups(const std::vector<int>& group_of_param) {
  for (exec::UnitState& unit : state_->executor->units()) {
    for (exec::Flat& flat : unit.flats) {
      for (exec::Slot& slot : flat.slots) slot.group = group_of_param.at(slot.index);
    }
  }
}

std::string Core::close(bool gather, const std::string& why) { return state_->close(gather, why); }

// ---- views of a core

void Calls::enter(const std::string& call) { state_->calling.enter(call); }

void Calls::leave() { state_->calling.leave(); }

void Calls::end_backward() {
  if (state_->model_ranks.stages || engine::in_backward()) return;
  if (!Core::State::BackwardEnd{*state_}.unseen()) return;
  TORCH_WARN_ONCE(
      "penstock: a backward reached no parameter of the engine's model. If no backward of a window "
      "reaches one on any rank, step() updates nothing and returns False. If the loss may be a "
      "constant, add 0 * output.sum() to it");
}

void Calls::failed(const std::string& call, const std::string& error) {
  // A refused call has changed nothing. The call of the other thread goes on.
  if (state_->closed || state_->calling.take_refused()) return;
  const std::string left = concat("called ", call, "(), which raised ", error);
  leave_turn(state_->group->board(), left, true);
  if (state_->outer) state_->outer->failed(left, true);
}

void Calls::name_threads(std::function<std::string(int64_t)> name) {
  state_->calling.name_by(std::move(name));
}

void Recomputation::begin(int unit) { state_->unit_again(unit); }

bool Recomputation::moves_inputs() const { return state_->executor->table().moves_activations(); }

std::function<at::Tensor()> Recomputation::save(int unit, const at::Tensor& input) {
  return state_->executor->activations().save(unit, input);
}

int64_t Recomputation::saved_bytes() const {
  return state_->executor->activations().shelf().live_bytes();
}

Tiles::Tiles(const Core& core, const std::string& param)
    : Tiles({core.state_, &*core.state_->tiled}, param, core.state_->config.tiling.loss_tokens) {}

std::vector<std::string> Tiles::names(const Core& core) {
  std::vector<std::string> names;
  for (const tiles::TiledWeight& one : core.state_->tiled->all()) names.push_back(one.name);
  return names;
}

}  // namespace penstock
