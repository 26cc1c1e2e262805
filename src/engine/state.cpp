#include "src/engine/state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/adopt.h"

namespace penstock {

std::string Core::State::where() const {
  return concat("rank ", group->rank(), ", step ", steps + 1, ", micro-step ", seen);
}

std::vector<std::string> Core::State::share_text(const std::string& label,
                                                 const std::string& text) {
  return engine::share_text(label, text, [&](const std::string& name, const std::string& payload) {
    return executor->share(name, payload);
  });
}

// ---- forward

void Core::State::forward_begin(bool grad_enabled) {
  check_open("forward");
  if (engine::in_backward()) return backward_enter(0);  // the whole model is recomputed
  if (backward_armed) recover();
  faulted = false;
  executor->activations().begin_forward();
  driver->begin(grad_enabled ? Section::kForward : Section::kEval);
  recording = grad_enabled && !planned;
  if (grad_enabled) {
    check_frozen();
    ++forwards;
    forward_order.clear();  // the last forward before the backward counts
  }
  if (!planned) watch_outside_reads();
  unit_begin(0);
  for (const int unit : spanning) driver->enter(Op::kForward, unit);
}

// A parameter that was frozen at initialize() has no master, no moments and no gradient hook.
void Core::State::check_frozen() {
  for (const engine::Tiled& one : tiled) {
    for (size_t tile = 0; tile < one.units.size(); ++tile) {
      tile_flat(one, tile).slots.front().param.set_requires_grad(one.whole.requires_grad());
    }
  }
  for (const exec::UnitState& unit : executor->units()) {
    for (const exec::Flat& flat : unit.flats) {
      if (flat.trainable) continue;
      for (const exec::Slot& slot : flat.slots) {
        if (!slot.param.requires_grad()) continue;
        throw RuntimeFault(concat(
            "[engine::forward] parameter \"", slot.name,
            "\" was frozen at initialize() and trains now: it has no optimizer state. Initialize "
            "with it trainable and freeze it afterwards, or close() and initialize again"));
      }
    }
  }
}

void Core::State::forward_end(const std::vector<at::Tensor>& outputs) {
  if (!engine::in_backward()) {
    outside_reads.reset();
    for (const int unit : spanning) driver->leave(Op::kForward, unit);
  }
  unit_end(0, outputs);
  if (engine::in_backward()) return;
  driver->finish();
  recording = false;
}

void Core::State::unit_begin(int unit) {
  if (engine::in_backward()) return backward_enter(unit);
  if (recording) forward_order.begin(unit);
  driver->enter(Op::kForward, unit);
}

void Core::State::unit_again(int unit) {
  if (!closed && engine::in_backward()) backward_enter(unit);
}

void Core::State::unit_end(int unit, const std::vector<at::Tensor>& outputs) {
  if (unit_events || unit == 0) {
    engine::before_backward_of(outputs, [weak = weak_from_this(), unit] {
      const auto self = weak.lock();
      if (self && !self->closed) self->in_hook([&] { self->backward_enter(unit); });
    });
  }
  if (engine::in_backward()) return;  // what is recomputed stays until its gradients are there
  if (recording) forward_order.end(unit);
  driver->leave(Op::kForward, unit);
}

void Core::State::forward_failed(const std::string& error) {
  outside_reads.reset();
  failed("forward", error);
  driver->abandon();
}

// For the other ranks, which will miss this one in their next collective.
void Core::State::failed(const char* what, const std::string& error) {
  faulted = true;
  group->set_position(concat("step ", steps + 1, ", where its ", what, " raised ", error));
}

void Core::State::watch_outside_reads() {
  if (!moves_params || outside_reads) return;
  std::unordered_map<const c10::StorageImpl*, int> unit_of_storage;
  for (size_t unit = 1; unit < executor->units().size(); ++unit) {
    for (const exec::Flat& flat : executor->units()[unit].flats) {
      for (const exec::Slot& slot : flat.slots) {
        unit_of_storage[slot.param.storage().unsafeGetStorageImpl()] = static_cast<int>(unit);
      }
    }
  }
  outside_reads.emplace(std::move(unit_of_storage), [this](int unit) { outside_read(unit); });
}

void Core::State::outside_read(int unit) {
  spanning.push_back(unit);
  driver->enter(Op::kForward, unit);
}

// ---- backward

void Core::State::start_backward() {
  if (backward_armed) return;
  if (loss_scale.active() && !scaled) {
    throw RuntimeFault(
        "[engine::backward] loss.backward() with fp16: the loss is not scaled. Call "
        "engine.backward(loss)");
  }
  backward_armed = true;
  driver->begin(seen + 1 >= config.batch.accumulate ? Section::kBackwardLast : Section::kBackward);
  reduced_last = seen + 1 >= config.batch.accumulate;
  for (size_t unit = 0; unit < waiting.size(); ++unit) {
    waiting[unit] = 0;
    for (exec::Flat& flat : executor->units()[unit].flats) {
      for (exec::Slot& slot : flat.slots) slot.arrived = false;
      if (flat.trainable) waiting[unit] += static_cast<int>(flat.slots.size());
    }
  }
  frozen_open.clear();
  if (!planned) backward_order.clear();
  engine::at_end_of_backward([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self && !self->closed) self->in_hook([&] { self->end_backward(); });
  });
  if (unit_events) {
    backward_enter(0);
    for (const int unit : spanning) backward_enter(unit);
  }
}

void Core::State::backward_enter(int unit) {
  if (!backward_armed && engine::in_side_backward()) {
    if (moves_params) driver->pin(unit);
    return;
  }
  start_backward();
  if (!unit_events) return;
  if (unit != 0) complete_frozen(unit);
  if (!planned) backward_order.begin(unit);
  driver->enter(Op::kBackward, unit);
  const bool all_frozen = waiting[unit] == 0 && !executor->units()[unit].trainable();
  if (all_frozen && unit != 0) frozen_open.push_back(unit);
}

// A frozen weight has no gradient to tell that it was used for the last time; by the order in which
// autograd works (later forward nodes first), reaching another unit's output does.
void Core::State::complete_frozen(int except) {
  const std::vector<int> open = std::exchange(frozen_open, {});
  for (const int unit : open) {
    if (unit == except) {
      frozen_open.push_back(unit);
    } else {
      unit_complete(unit);
    }
  }
}

void Core::State::gradient_arrived(int unit, int flat_index, int slot_index) {
  start_backward();
  exec::Slot& slot = executor->units()[unit].flats[flat_index].slots[slot_index];
  at::Tensor& gradient = slot.param.mutable_grad();
  if (gradient.defined()) {
    take_gradient(unit, flat_index, slot_index, gradient);
    gradient.reset();
  }
  // Where each use of a module is recomputed in a backward of its own, gradients come once a use.
  if (std::exchange(slot.arrived, true) || --waiting[unit] != 0) return;
  const std::vector<exec::Flat>& flats = executor->units()[unit].flats;
  const bool has_frozen =
      std::any_of(flats.begin(), flats.end(), [](const exec::Flat& one) { return !one.trainable; });
  if (unit == 0 || std::find(spanning.begin(), spanning.end(), unit) != spanning.end()) return;
  if (has_frozen && moves_params) {
    frozen_open.push_back(unit);
  } else {
    unit_complete(unit);
  }
}

void Core::State::take_gradient(int unit, int flat, int slot, const at::Tensor& gradient) {
  if (executor->take_gradient(unit, flat, slot, gradient) || !bad.empty()) return;
  const std::string& name = executor->units()[unit].flats[flat].slots[slot].name;
  bad = concat("parameter \"", name, "\", ", where());
}

void Core::State::unit_complete(int unit) {
  if (!planned) backward_order.end(unit);
  driver->leave(Op::kBackward, unit);
}

void Core::State::end_backward() {
  complete_frozen(-1);
  if (!planned) backward_order.end(0);
  driver->finish();
  backward_armed = scaled = false;
  ++seen;
  if (!planned) replan();
}

// The backward before this forward threw: nothing of its window can be trusted.
void Core::State::recover() {
  driver->abandon();
  executor->discard_gradients();
  backward_armed = scaled = false;
  seen = 0;
  bad.clear();
}

// Step one is over: from here on the plan follows the order that was seen, the same on every rank.
void Core::State::replan() {
  planned = true;
  const int num_units = static_cast<int>(executor->units().size());
  const auto merge = [&](const engine::OrderRecord& order, std::vector<Visit>& visits) {
    if (order.empty()) return;
    visits = order.visits(num_units);
    // A tile that is used outside of the forward only is brought there.
    std::erase_if(visits, [&](const Visit& visit) {
      return &order == &forward_order && is_tile[visit.unit] && !order.has(visit.unit);
    });
    for (const int unit : spanning) {
      std::erase_if(visits, [unit](const Visit& visit) { return visit.unit == unit; });
      visits.insert(visits.begin() + 1, {unit, Mark::kBegin});
      visits.insert(visits.end() - 1, {unit, Mark::kEnd});
    }
  };
  if (unit_events) merge(forward_order, model.forward);
  merge(backward_order, model.backward);
  const std::string mine =
      engine::visits_text(model.forward) + "\n" + engine::visits_text(model.backward);
  const std::string difference = engine::first_difference(share_text("order of step one", mine));
  if (!difference.empty()) {
    // The order assumed so far serves ranks that skip different units. Where parameters move it
    // must have served them all; reductions alone can be made in any common order.
    bool served = true;
    const std::string off_plan = std::to_string(driver->off_plan_events());
    for (const std::string& count : share_text("off plan in step one", off_plan)) {
      served &= count == "0";
    }
    if (moves_params && !served) {
      throw RuntimeFault(
          concat("[engine::replan] in step one the ranks ran their units in different orders: ",
                 difference));
    }
    model = assumed;
  }
  make_plans();
}

// ---- step

double Core::State::divisor() const {
  return static_cast<double>(std::min(seen, config.batch.accumulate)) * loss_scale.value();
}

bool Core::State::step(const std::vector<OptimizerConfig>& groups,
                       const std::function<void()>& external) {
  if (backward_armed) {
    recover();
    throw RuntimeFault("[engine::step] the last backward did not end: its window was dropped");
  }
  exec::Executor::Update update;
  update.groups = groups;
  update.clip = config.clip;
  update.divisor = divisor();
  update.bad = std::exchange(bad, "");
  update.external = external;
  executor->begin_update(std::move(update));
  const bool early = !reduced_last;
  seen = 0;
  forwards = 0;
  driver->begin(early ? Section::kUpdateEarly : Section::kUpdate);
  try {
    driver->finish();
    // Parameters that do not move are the model's own: the user may read them at once.
    if (!config.offload.late_update || !moves_params) executor->finish_updates();
  } catch (const exec::NonFinite& error) {
    driver->abandon();
    if (!loss_scale.overflow()) throw;
    ++skipped;
    overflow = error.what();
    return false;
  } catch (const std::exception& error) {  // thrown on, after the section is closed
    failed("update", error.what());
    executor->discard_gradients();
    driver->abandon();
    throw;
  }
  loss_scale.good_step();
  for (size_t unit = 0; unit < executor->units().size(); ++unit) {
    executor->units()[unit].param_ready.wait();
  }
  ++steps;
  executor->set_step(steps + 1);
  return true;
}

void Core::State::check_open(const char* call) const {
  if (closed) throw RuntimeFault(concat("[engine::", call, "] the engine is closed"));
}

void Core::State::close(bool whole) {
  if (closed) return;
  closed = true;
  try {
    executor->drain();
    if (tiers.disk) tiers.disk->wait_for_all();  // reads of an update that did not come
  } catch (const RuntimeFault&) {  // thrown where it happened; what is left needs no peer
    faulted = true;
  }
  whole = whole && !faulted;
  outside_reads.reset();
  hooks.clear();
  executor->activations().close();
  if (whole) {
    driver->abandon();
    executor->discard_gradients();
  }
  for (engine::Tiled& one : tiled) detach_whole(one);
  if (!whole) tiers.close_disk();  // waits for what is still in flight into the copies below
  for (size_t index = 0; index < executor->units().size(); ++index) {
    const int unit = static_cast<int>(index);
    if (whole && !executor->full(unit)) executor->run(executor->move_to(unit, Phase::kForward));
    if (whole) executor->require(unit);
    exec::UnitState& state = executor->units()[unit];
    for (exec::Flat& flat : state.flats) {
      if (is_tile[index] && state.attached) return_rows(unit);
      if (!whole) flat.say_gone();
      if (!state.attached || is_tile[index]) flat.detach();
      for (exec::Slot& slot : flat.slots) {
        if (state.attached && !is_tile[index]) slot.param.set_data(slot.param.detach().clone());
      }
      flat.free();
    }
    tiers.device.trim();
    tiers.host.trim();
  }
  tiers.close_disk();
  group->close();
}

}  // namespace penstock
