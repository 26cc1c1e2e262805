#include "src/engine/step/core_state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/engine/step/backward_end.h"
#include "src/engine/step/planning.h"
#include "src/engine/step/stage_backward.h"
#include "src/engine/step/window_agreement.h"
#include "src/engine/watch/observer.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

// Gradients arrive on the stream of initialize(), and that stream also orders the frees of memory.
std::string other_stream(const device::Device& device) {
  return concat("[engine::forward] a training forward runs on a stream of ", device.where().str(),
                " that was not current at initialize(). Make one stream current for both: before "
                "initialize() and in the training loop");
}

// A parameter that was frozen at initialize() cannot train later, because it has no master, moments
// or gradient hook.
void check_frozen(const std::vector<exec::UnitState>& units) {
  for (const exec::UnitState& unit : units) {
    for (const exec::Flat& flat : unit.flats) {
      if (flat.trainable) continue;
      for (const exec::Slot& slot : flat.slots) {
        if (!slot.param.requires_grad()) continue;
        throw RuntimeFault(concat(
            "[engine::forward] parameter \"", slot.name,
            "\" was frozen at initialize() and requires a gradient now, but it has no optimizer "
            "state. Initialize while it is trainable and freeze it afterwards, or close() the "
            "engine "
            "and initialize again"));
      }
    }
  }
}

// Before a step, checks that the cut modules were called and that no gathered() block is open. The
// tensors of an open block would keep the old values.
void check_model(const engine::Driver& driver, const exec::Executor& executor,
                 const engine::WholeParams& wholes, const engine::ModelRanks& model_ranks) {
  if (model_ranks.tensor) model_ranks.tensor->check_called(executor.units());
  if (!driver.holds() || (executor.table().rests_whole() && !wholes.used())) return;
  throw RuntimeFault(
      "[engine::step] step() was called inside gathered() or inference(): the gathered values "
      "would not show the update. Leave the block before the step");
}

// A scheduler may set momentum after initialize(). In that case initialize() made no room for the
// moment.
void check_groups(const Config& config, const std::vector<OptimizerConfig>& groups) {
  const int room = num_moments(config);
  for (size_t i = 0; i < groups.size(); ++i) {
    if (num_moments(groups[i]) <= room) continue;
    const OptimizerKind& kind = kind_of(groups[i].type);
    throw ConfigError(
        concat("[engine::step] parameter group ", i, " is ", kind.name,
               kind.needs_momentum ? concat(" with \"momentum\" ", groups[i].momentum) : "",
               ", which keeps ", num_moments(groups[i]),
               " moments per parameter, but initialize() made room for ", room,
               kind.needs_momentum ? ". Build the optimizer with momentum > 0, or keep the "
                                     "momentum at 0 (OneCycleLR: cycle_momentum=False)"
                                   : ". Initialize the engine with that optimizer"));
  }
}

// Thrown by Update::hear if the window is not complete, because backwards that gave no gradient on
// any rank do not count. The window stays open and no update is made.
class StillOpen : public std::exception {};

// Throws if users edited a gathered unit that is about to be freed. Inside gathered(), release()
// makes this check.
void refuse_edit(const engine::Driver& driver, engine::OutsideEdits& border, int unit,
                 const char* where) {
  if (driver.held(unit) > 0) return;
  engine::OutsideEdits::refuse_edit(border.edited(unit, false), where);
}

// Inside gathered(), a forward whose units are all held runs no collective.
bool holds_all(const engine::Driver& driver, const exec::Executor& executor) {
  if (!engine::forwards_meet(executor)) return true;
  for (size_t unit = 0; unit < executor.units().size(); ++unit) {
    const bool empty = executor.units()[unit].flats.empty();
    if (!empty && driver.held(static_cast<int>(unit)) == 0) return false;
  }
  return true;
}

// Returns whether all backwards of a window reduce their gradients, and not only the last backward.
bool reduces_each(const exec::Executor& executor) {
  return num_shards(executor.table().at(Role::kGrad, Phase::kHold), executor.mesh()) > 1;
}

void add_once(std::vector<int>& units, int unit) {
  if (std::count(units.begin(), units.end(), unit) == 0) units.push_back(unit);
}

// Returns whether the backward in progress accumulates gradients of this model. It does not in
// torch.autograd.grad(), in a backward(inputs=...) for other tensors, or if this model is frozen
// and a backward of a second model goes through it.
bool expects_gradients(const tiles::TiledWeights& tiled,
                       const std::vector<engine::GradientHook>& hooks) {
  if (!tiled.all().empty() && !engine::in_side_backward()) return true;
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const engine::GradientHook& hook) { return hook.expected(); });
}

}  // namespace

// ---- forward

void Core::State::forward_begin(bool grad_enabled) {
  check_open("forward");
  if (wholes->shows()) {
    throw RuntimeFault(
        "[engine::forward] a forward was called inside gathered(): the parameters are full tensors "
        "there, but tensor and pipeline ranks compute with their parts. Leave the block before the "
        "forward");
  }
  if (grad_enabled && unit_events && stream && tiers.computes.current() != *stream)
    throw RuntimeFault(other_stream(tiers.computes));
  if (engine::in_backward()) {  // the whole model is recomputed
    return backward_enter(0, engine::now(), engine::in_graph());
  }
  BackwardEnd{*this}.after_error("forward", true);
  faulted = false;
  if (outer) outer->went_on();
  if (grad_enabled && moves_params) {
    engine::go_on(*executor, *window, *driver, exec::Norm::Next::kForward,
                  [this] { drop_gradients(); });
  }
  if (moves_params && !model_ranks.stages && !holds_all(*driver, *executor)) {
    take_turn(group->board(), "forward", engine::at_this_point("began a forward", *window, steps));
    if (grad_enabled) ++forwards.begun;
  }
  executor->activations().begin_forward();
  border->look_at_params();
  const Section section = grad_enabled ? Section::kForward : Section::kEval;
  driver->begin(section, Planning{*this}.action_of(section));
  if (grad_enabled) {
    tiled->follow_freezing();
    for (engine::GradientHook& hook : hooks) hook.follow();
    check_frozen(executor->units());
    window->on(engine::Call::kForward);
    monitor->begins();
  }
  order->begin_forward(grad_enabled);
  if (model_ranks.tensor) model_ranks.tensor->replicated.forget();
  if (exchanges && grad_enabled) exchanges->begin_forward();
  if (!order->done()) watch_outside_reads();
  unit_begin(0);
  for (const int unit : order->spanning()) driver->enter(Op::kForward, unit);
}

void Core::State::forward_end(const std::vector<at::Tensor>& outputs) {
  if (!engine::in_backward()) {
    outside_reads.reset();
    for (const int unit : order->spanning()) {
      refuse_edit(*driver, *border, unit, "in forward");
      driver->leave(Op::kForward, unit);
    }
  }
  unit_end(0, outputs);
  if (engine::in_backward()) return;
  // In training the norm reports edits that were found on a device, but an evaluation has no norm.
  if (driver->section() == Section::kEval) {
    engine::OutsideEdits::refuse_edit(executor->values().resolve_doubts(), "in forward");
  }
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    forwards.graphs.emplace_back(output.grad_fn());
    break;
  }
  driver->finish();
  order->end_forward();
  show(group->board(), "the caller's code, after forward");
}

// [all ranks] Returns whether this backward goes through several forwards on any rank, so that it
// may return to units in an order that no plan has. Graphs that have been freed do not count (for
// example, those of an evaluation without no_grad()).
bool Core::State::returns_to_units() {
  const Forwards since = std::exchange(forwards, {});
  if (since.begun < 2 || !order->may_return()) return false;
  const auto alive = std::count_if(since.graphs.begin(), since.graphs.end(),
                                   [](const auto& graph) { return !graph.expired(); });
  return engine::say_each(*executor, "several forwards", alive > 1).find('1') != std::string::npos;
}

void Core::State::unit_begin(int unit) {
  if (model_ranks.window && !model_ranks.window->computes(unit)) return;
  const engine::GraphPlace here = progress[unit].began = engine::now();
  if (engine::in_backward()) return backward_enter(unit, here, engine::in_graph());
  // A layer that is used twice in a forward becomes a spanning unit, which stays whole for the
  // entire pass.
  if (!model.units[unit].block && !order->spans(unit) && order->enters_again(unit)) {
    order->span(unit);
    driver->enter(Op::kForward, unit);
  }
  order->begin(Op::kForward, unit);
  driver->enter(Op::kForward, unit);
}

void Core::State::unit_again(int unit) {
  if (closed || !engine::in_backward()) return;
  backward_enter(unit, engine::now(), engine::in_graph());
}

void Core::State::unit_end(int unit, const std::vector<at::Tensor>& outputs) {
  if (model_ranks.window && !model_ranks.window->computes(unit)) return;
  const bool reads_none = !model.units[unit].block && engine::only_looked_up(outputs);
  if (unit == 0 || (unit_events && !reads_none)) {
    const auto reached = [weak = weak_from_this(), unit,
                          since = progress[unit].began](const engine::GraphPlace& at) {
      const auto self = weak.lock();
      if (self && !self->closed) self->in_hook([&] { self->backward_enter(unit, since, at); });
    };
    engine::before_backward_of(outputs, progress[unit].began, reached);
  }
  if (engine::in_backward()) return;  // a recomputed unit stays whole until its gradients come
  if (at::GradMode::is_enabled()) {
    ++progress[unit].forwards;
    progress[unit].last_forward = progress[unit].began;
  }
  refuse_edit(*driver, *border, unit, "in forward");
  order->end(Op::kForward, unit);
  driver->leave(Op::kForward, unit);
}

void Core::State::forward_failed(const std::string& error) {
  if (closed) return;
  outside_reads.reset();
  failed("forward", error);
  driver->abandon();
}

// Publishes this rank's error as its position. In their next collective, other ranks will wait for
// this rank, and their errors will quote the position.
void Core::State::failed(const char* what, const std::string& error) {
  faulted = true;
  show(group->board(), concat("the caller's code, after its ", what, " raised"));
  trouble = concat("step ", steps + 1, ", where its ", what, " raised ", error);
  group->set_position(Position::of(trouble));
  const std::string left =
      concat("left its ", what, " of step ", steps + 1, " because of an error: ", error);
  leave_turn(group->board(), left, driver->owes());
  if (outer) outer->failed(left, driver->owes());
  Observer{*this}.dump(what);
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
  outside_reads.emplace(std::move(unit_of_storage), [this](int unit) {
    order->span(unit);
    driver->enter(Op::kForward, unit);
  });
}

// ---- backward

void Core::State::look_at_gradients(bool adds) {
  if (border->look_at_gradients(adds) != engine::OutsideEdits::SeenGradients::kAllDropped) return;
  if (!window->complete()) {
    TORCH_WARN_ONCE(
        "penstock: the gradients of ", window->seen(), " of ", config.batch.accumulate,
        " backwards were dropped, because zero_grad() or .grad = None was called before "
        "step(). engine.step() clears gradients itself after the update");
  }
  drop_gradients();
  executor->gradients().leave_zeros(false);
}

void Core::State::drop_gradients() {
  if (std::exchange(raised, Raised::kNone) != Raised::kNone) driver->abandon();
  monitor->drop();
  border->hide_gradients();
  exec::discard(*executor);
  window->on(engine::Call::kDrop);
}

void Core::State::start_backward(bool in_autograd) {
  BackwardEnd{*this}.after_error("backward", true);
  if (window->armed()) return;
  const std::shared_ptr<void> running = calling.enter_backward();
  std::shared_ptr<BackwardEnd::BackwardGuard> guard;
  if (in_autograd) {
    guard = std::make_shared<BackwardEnd::BackwardGuard>(weak_from_this(), running);
  }
  fault = nullptr;
  show(group->board(), "backward");
  look_at_gradients(true);
  border->hide_gradients();
  window->on(engine::Call::kBackwardBegin);
  engine::go_on(*executor, *window, *driver, exec::Norm::Next::kBackward,
                [this] { drop_gradients(); });
  const Section section = window->reduces() ? Section::kBackwardLast : Section::kBackward;
  // The stages of a pipeline run forwards and backwards in orders of their own.
  if (!model_ranks.stages && (moves_params || window->reduces() || reduces_each(*executor))) {
    take_turn(group->board(), "backward",
              engine::at_this_point("began a backward", *window, steps));
  }
  if (returns_to_units()) {
    driver->finish();
    order->keep_whole();
    model = order->assumed();
    if (exchanges) exchanges->put_into(model);
    Planning{*this}.make();
  }
  driver->begin(section, Planning{*this}.action_of(section));
  for (size_t unit = 0; unit < progress.size(); ++unit) {
    Progress& own = progress[unit];
    own.entered.reset();
    own.waiting = 0;
    for (exec::Flat& flat : executor->units()[unit].flats) {
      for (exec::Slot& slot : flat.slots) {
        slot.arrived = false;
        slot.version = slot.param._version();
        own.waiting += flat.trainable && slot.param.requires_grad() ? 1 : 0;
      }
    }
    own.expected = own.waiting > 0;
  }
  open_units.clear();
  executor->gradients().begin_backward(window->seen());
  order->begin_backward();
  if (exchanges) exchanges->begin_backward();
  if (in_autograd) {
    guard->begun = true;
    engine::at_end_of_backward([guard] {
      const auto self = guard->state.lock();
      if (self && !self->closed) self->in_hook([&] { self->end_backward(); });
      guard->ended = true;
    });
  }
  if (unit_events) {
    backward_enter(0, {}, {});
    for (const int unit : order->spanning()) backward_enter(unit, {}, {});
  }
}

void Core::State::backward_enter(int unit, const engine::GraphPlace& since,
                                 const engine::GraphPlace& at) {
  if (!window->armed() && !expects_gradients(*tiled, hooks)) {
    if (!moves_params) return;
    if (model_ranks.window && model_ranks.window->only_inputs()) {
      return StageBackward{*this}.enter(unit, since, at);
    }
    return driver->pin(unit);
  }
  start_backward();
  if (!unit_events) return;
  if (unit != 0) complete_open(unit, at);
  // A recomputed forward has a later place in the graph than the nodes that use its values.
  Progress& own = progress[unit];
  // Only an earlier place counts. The place of the original forward always counts, because another
  // thread may have recorded the place of the recomputed forward.
  const bool counts = !own.entered || own.entered->follows(since) || since == own.last_forward;
  if (counts) own.entered = since;
  const bool spans = order->spans(unit);
  // In the plan of step one, the unit's lines are at the place of its module. To enter the unit
  // here would run all earlier lines of the plan.
  if (spans && !order->done()) return driver->pin(unit);
  order->begin(Op::kBackward, unit);
  driver->enter(Op::kBackward, unit);
  // A unit that ran several times is older than nodes between its uses.
  const bool only_use = own.forwards == 1 && own.last_forward == since;
  if ((!own.expected || only_use) && unit != 0 && !spans) add_once(open_units, unit);
}

// Gradients alone do not show when a unit's last use in backward has ended, because some of its
// parameters may be frozen or get no gradient. Autograd works from later forward nodes to earlier
// ones. So the last use has ended when the backward reaches a node that is older than the unit's
// forward. The tiles of layers inside the unit are entered before that. All ranks then reduce the
// unit's gradients at the same place of the plan, whichever parameters got a gradient.
void Core::State::complete_open(int except, const engine::GraphPlace& at) {
  const std::vector<int> open = std::exchange(open_units, {});
  for (const int unit : open) {
    const std::optional<engine::GraphPlace>& since = progress[unit].entered;
    if (unit == except || (since && at.follows(*since))) {
      open_units.push_back(unit);
    } else {
      unit_complete(unit);
    }
  }
}

void Core::State::gradient_arrived(int unit, int flat_index, int slot_index) {
  start_backward();
  exec::Slot& slot = executor->units()[unit].flats[flat_index].slots[slot_index];
  if (slot.param._version() != slot.version) {
    throw RuntimeFault(concat(
        "[engine::backward] parameter \"", slot.name,
        "\" was changed in place during backward, for example by an optimizer in a hook, which "
        "uses only this rank's gradient. Let engine.step() update parameters"));
  }
  at::Tensor& gradient = slot.param.mutable_grad();
  if (gradient.defined()) {
    take_gradient(unit, flat_index, slot_index, gradient);
    gradient.reset();
  }
  // If each use of a module is recomputed in its own backward, the module gets one gradient per
  // use.
  if (std::exchange(slot.arrived, true) || --progress[unit].waiting != 0) return;
  executor->gradients().pack(executor->units()[unit]);
  const std::vector<exec::Flat>& flats = executor->units()[unit].flats;
  const bool has_frozen = std::any_of(flats.begin(), flats.end(), [](const exec::Flat& one) {
    return std::any_of(one.slots.begin(), one.slots.end(),
                       [](const exec::Slot& slot) { return !slot.param.requires_grad(); });
  });
  if (unit == 0 || order->spans(unit)) return;
  if (has_frozen && moves_params) {
    add_once(open_units, unit);
  } else {
    unit_complete(unit);
  }
}

void Core::State::take_gradient(int unit, int flat, int slot, const at::Tensor& gradient) {
  window->contribute();
  // Weighted in fp32, because a weighted gradient could underflow in a smaller dtype.
  const at::Tensor weighted =
      backward_weight == 1.0
          ? gradient
          : gradient.to(at::promote_types(gradient.scalar_type(), at::kFloat)).mul(backward_weight);
  if (executor->gradients().take(unit, flat, slot, weighted) || window->blamed()) return;
  const std::string& name = executor->units()[unit].flats[flat].slots[slot].name;
  window->blame(concat("parameter \"", name, "\", rank ", group->rank(), ", step ", steps + 1,
                       ", micro-step ", window->seen()));
}

void Core::State::enter_tile(int unit) {
  if (!moves_params) return;
  if (!engine::in_backward()) return driver->enter(Op::kForward, unit);
  if (!window->armed() && engine::in_side_backward()) return driver->pin(unit);
  start_backward();
  driver->enter(Op::kBackward, unit);
}

void Core::State::leave_tile(int unit, Mark in_backward) {
  if (!engine::in_backward()) {
    order->add(Op::kForward, {unit, Mark::kWhole});
    if (moves_params) driver->leave(Op::kForward, unit);
    return;
  }
  const bool nothing = in_backward == Mark::kUse && !moves_params;
  // If the window is not armed, enter_tile() pinned the unit for autograd.grad().
  if (nothing || !window->armed()) return;
  order->add(Op::kBackward, {unit, in_backward});
  if (in_backward == Mark::kUse) {
    driver->pause(unit);
  } else {
    driver->leave(Op::kBackward, unit);
  }
}

bool Core::State::begin_tile_backward(bool uses) {
  if (!window->armed() && engine::in_side_backward()) return false;
  start_backward();
  if (uses && moves_params) complete_open(-1, engine::in_graph());
  return true;
}

void Core::State::take_tile_gradient(int unit, const at::Tensor& gradient) {
  take_gradient(unit, 0, 0, gradient);
}

void Core::State::unit_complete(int unit) {
  refuse_edit(*driver, *border, unit, "in backward");
  order->end(Op::kBackward, unit);
  driver->leave(Op::kBackward, unit);
  progress[unit].entered.reset();
  std::erase(open_units, unit);
}

void Core::State::end_backward() {
  const std::shared_ptr<void> leave(nullptr, [&](void*) { calling.leave_backward(); });
  complete_open(-1, {});
  for (Progress& unit : progress) unit.forwards = 0;
  refuse_edit(*driver, *border, 0, "in backward");
  order->end(Op::kBackward, 0);
  for (exec::UnitState& unit : executor->units()) executor->gradients().pack(unit);
  driver->finish();
  window->on(engine::Call::kBackwardEnd);
  border->show_gradients();
  show(group->board(), "the caller's code, after backward");
  if (order->done()) return;
  // A backward through frozen weights alone does not show the order of the units.
  const bool gave = model_ranks.stages || window->gave();
  // Only the ranks of this stage exchange texts, because other stages are at other places in the
  // schedule.
  const std::vector<std::string> all = executor->share("gave in step one", gave ? "1" : "0", true);
  if (std::count(all.begin(), all.end(), "1") == 0) return;
  // Step one is over, and new plans follow the order on which all ranks agreed.
  model = order->agree(driver->off_plan_events(), Planning{*this}.share_in_stage());
  Planning{*this}.make();
}

// ---- step

double Core::State::divisor() const {
  // Each stage of a rank runs one backward per micro-batch.
  const double averaged =
      config.batch.reduction == "sum"
          ? 1.0
          : static_cast<double>(window->num_averaged()) / config.parallel.virtual_stages;
  return averaged * loss_scale.value();
}

void Core::State::prepare_step(const std::vector<OptimizerConfig>& groups) {
  check_groups(config, groups);
  check_model(*driver, *executor, *wholes, model_ranks);
  look_at_gradients(false);
  border->look_at_params();
  border->hide_gradients();
  if (outer) outer->before_update();
}

bool Core::State::step(const std::vector<OptimizerConfig>& groups,
                       const std::function<void()>& external, const std::string& options) {
  if (const char* why = window->refusal(engine::Call::kUpdate)) {
    driver->abandon();
    drop_gradients();
    throw RuntimeFault(why);
  }
  prepare_step(groups);
  const std::string bad = window->take_blamed();
  exec::Update update{groups, config.clip, bad, external, monitor->counted(), {}, {}, rules};
  update.say = [this, told = engine::options_text(groups, options) + monitor->say()] {
    return engine::say_window(*window, *driver) + told + static_cast<char>('0' + save_wanted);
  };
  update.hear = [this, whole = window->complete()](std::vector<std::string> all) {
    engine::hear_asked(all, save_wanted, save_agreed);
    monitor->hear(all);
    if (!engine::hear_window(all, *window, *driver)) return 0.0;
    if (window->seen() == 0 || (whole && !window->complete())) throw StillOpen();
    const double averaged_over = divisor();
    window->on(engine::Call::kUpdate);
    return averaged_over;
  };
  executor->updates().begin(std::move(update));
  driver->begin(window->reduces() ? Section::kUpdate : Section::kUpdateEarly);
  try {
    driver->finish();
    // If forwards compute with resting parameters, the user may read these right after step().
    if (!config.offload.late_update || executor->table().rests_whole()) {
      executor->updates().finish(false);
    }
    if (outer) outer->after_update(steps + 1);
  } catch (const StillOpen&) {
    window->blame(bad);
    executor->updates().discard();
    executor->gradients().reopen();
    driver->abandon();
    border->show_gradients();
    return false;
  } catch (const exec::NonFinite& error) {
    driver->abandon();
    monitor->drop();
    if (!loss_scale.overflow() && config.nonfinite != "skip") throw;
    ++skipped;
    overflow = error.what();
    return false;
  } catch (const std::exception& error) {  // a step that was refused leaves its window as it was
    failed(window->seen() == 0 ? "update" : "step", error.what());
    drop_gradients();
    driver->abandon();
    throw;
  }
  loss_scale.good_step();
  executor->updates().arrive();
  Planning{*this}.begin_next_step();
  Observer{*this}.end_step(groups);
  return true;
}

void Core::State::check_open(const char* call) const {
  if (closed) throw RuntimeFault(concat("[engine::", call, "] the engine is closed", closed_by));
  if (!unloaded.empty()) throw RuntimeFault(unloaded);
}

}  // namespace penstock
