#include "src/engine/step/driver.h"

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/step_queries.h"

namespace penstock::engine {

namespace {

constexpr size_t kNotFound = static_cast<size_t>(-1);

bool is_training_forward(Section section) {
  return section == Section::kForward || section == Section::kForwardNext;
}

bool is_forward(Section section) {
  return is_training_forward(section) || section == Section::kEval;
}

// Returns whether the section leaves parameters in phase `hold` for the next section of the window.
bool is_followed(Section section) {
  return is_training_forward(section) || section == Section::kBackward;
}

bool is_backward(Section section) {
  return section == Section::kBackward || section == Section::kBackwardLast;
}

// Returns the name of the plan that runs. The actions of a window have one plan per direction.
PlanName name_of(Section section, int action) {
  if (action == kNoAction || section == Section::kEval) return {section, action};
  return {is_backward(section) ? Section::kBackward : Section::kForward, action};
}

bool moves_gradients(const Step& step) { return step.op == Op::kMove && step.role == Role::kGrad; }
// A `sum` line is queued with the gradient moves.
bool sums_gradients(const Step& step) { return step.op == Op::kSum; }

// Layers make their exchanges themselves, and StageLanes has the messages between stages.
bool runs_elsewhere(const Step& step) { return is_layer_exchange(step) || is_transfer(step); }

bool exchanges_data(const Step& step) {
  if (runs_elsewhere(step)) return false;
  return step.op == Op::kSum || step.op == Op::kNorm ||
         std::any_of(step.moves.begin(), step.moves.end(),
                     [](const auto& move) { return move.is_collective(); });
}

}  // namespace

Driver::Driver(exec::Executor& executor, ActivationMemory& memory, std::vector<bool> kept)
    : executor_(executor),
      memory_(memory),
      recorder_(*executor.traffic().tiers().recorder),
      kept_(std::move(kept)) {
  const size_t num_units = executor.units().size();
  began_ns_.assign(num_units, 0);
  for (size_t unit = 0; unit < num_units; ++unit) {
    const std::string name = concat(" u", unit, " (", executor.units()[unit].name, ")");
    computes_[0].push_back(std::make_shared<const std::string>("forward" + name));
    computes_[1].push_back(std::make_shared<const std::string>("backward" + name));
  }
  active_.assign(num_units, 0);
  done_.assign(num_units, false);
  drop_later_.assign(num_units, false);
  unforeseen_.assign(num_units, false);
  pinned_.assign(num_units, false);
  held_.assign(num_units, 0);
  late_.assign(num_units, false);
}

void Driver::set_plan(const PlanName& name, const Plan& plan) {
  PENSTOCK_ASSERT(!running_, "[engine::Driver::set_plan] a section is running");
  plans_[name] = executor_.prepare(plan);
}

Plan Driver::plan(const PlanName& name) const {
  Plan plan;
  for (const exec::PlannedStep& planned : plans_.at(name)) plan.steps.push_back(planned.step);
  return plan;
}

void Driver::begin(Section section, int action) {
  if (running_) finish();
  if (section == Section::kForward && carries_) section = Section::kForwardNext;
  steps_ = &plans_.at(name_of(section, action));
  section_ = section;
  next_ = 0;
  running_ = true;
  if (section == Section::kForward && !lost_hold_) memory_.begin_window();
  memory_.begin_section(is_training_forward(section), is_backward(section));
  if (is_backward(section)) backward_ns_ = trace::now_ns();
  std::fill(done_.begin(), done_.end(), false);
  const bool goes_on = is_backward(section) || section == Section::kForwardNext;
  if (goes_on && std::exchange(lost_hold_, false)) bring_back();
  if (!goes_on) {
    lost_hold_ = carries_ && section == Section::kEval;
    carries_ = false;
    for (size_t unit = 0; unit < active_.size(); ++unit) {
      const bool stays = pinned_[unit] || held_[unit] > 0 || kept_[unit];
      if (!stays) executor_.params().drop(static_cast<int>(unit));
    }
  }
  // No plan line moves units that are kept. They are not whole yet, or no longer after a load.
  // They come one after another, so that their buffers take memory one after another.
  for (size_t unit = 0; unit < kept_.size(); ++unit) {
    if (kept_[unit]) executor_.params().require(static_cast<int>(unit));
  }
  if (section != Section::kUpdate && section != Section::kUpdateEarly) run_moves();
}

// Moves all units back to `hold` after an evaluation inside the window. If `hold` is whole, no plan
// line gathers the units again. Ranks may use different units, so every rank moves all units, in
// this order.
void Driver::bring_back() {
  for (size_t unit = 0; unit < active_.size(); ++unit) {
    if (executor_.units()[unit].flats.empty()) continue;
    executor_.params().move_to(static_cast<int>(unit), Phase::kHold);
  }
}

size_t Driver::find(Op op, int unit, bool end) const {
  for (size_t i = next_; i < steps_->size(); ++i) {
    const Step& step = (*steps_)[i].step;
    if (step.op == op && step.units.front() == unit && (step.mark == Mark::kEnd) == end) return i;
  }
  return kNotFound;
}

int Driver::computing() const {
  int innermost = 0;
  for (size_t unit = 0; unit < active_.size(); ++unit) {
    if (active_[unit] > 0 && began_ns_[unit] > began_ns_[static_cast<size_t>(innermost)]) {
      innermost = static_cast<int>(unit);
    }
  }
  return innermost;
}

// Records a compute event. Forward events nest like calls. Backward events follow each other. An
// entered unit may wait while autograd works on a different unit, so an event begins at the end of
// the previous unit's backward.
void Driver::compute_ends(Op op, int unit) {
  if (!recorder_.on()) return;
  const int64_t now = trace::now_ns(), began = std::exchange(began_ns_[unit], 0);
  const bool backward = op == Op::kBackward;
  if (!backward && began == 0) return;
  recorder_.add({backward ? std::max(began, std::exchange(backward_ns_, now)) : began, now, 0, 0, 0,
                 computes_[backward ? 1 : 0][static_cast<size_t>(unit)], trace::Recorder::kModel,
                 trace::Kind::kCompute});
}

void Driver::enter(Op op, int unit) {
  if (active_[unit] == 0) began_ns_[unit] = trace::now_ns();
  if (active_[unit]++ > 0) {  // already entered: a recomputation, or a nested call
    executor_.params().require(unit);
    return;
  }
  memory_.event(op, unit, false);
  const size_t at = running_ ? find(op, unit, false) : kNotFound;
  if (at != kNotFound) {
    pass(at);
    if ((*steps_)[at].step.mark == Mark::kBegin) run_moves();
  }
  // If the unit is whole, an earlier plan line gathered it, and a later one drops it.
  if (!executor_.params().whole(unit)) {
    ++off_plan_;
    unforeseen_[unit] = at == kNotFound;
  }
  executor_.params().require(unit);
}

void Driver::leave(Op op, int unit) {
  const bool entered = active_[unit] > 0;
  active_[unit] = op == Op::kBackward ? 0 : std::max(0, active_[unit] - 1);
  if (active_[unit] > 0) return;
  memory_.event(op, unit, true);
  compute_ends(op, unit);
  if (op == Op::kBackward) done_[unit] = true;
  if (running_) {
    // If the unit's parameters do not move, there was no enter(), so its first line is passed here.
    if (!entered) pass(find(op, unit, false));
    const size_t end = find(op, unit, true);
    // A backward that returns to units may enter a unit again after the line of its end. finish()
    // runs these lines.
    const bool skips =
        op == Op::kBackward && executor_.table().moves_params() && end != kNotFound &&
        std::any_of(steps_->begin() + static_cast<ptrdiff_t>(next_),
                    steps_->begin() + static_cast<ptrdiff_t>(end), [this](const auto& planned) {
                      const Step& step = planned.step;
                      if (step.op != Op::kBackward || step.mark != Mark::kEnd) return false;
                      const int other = step.units.front();
                      return other != 0 && active_[other] == 0 && !done_[other];
                    });
    if (!skips) {
      pass(end);
      run_moves();
    }
    pump();
  }
  // put_away() does nothing if a plan line has already moved the unit's activations or tokens.
  if (op == Op::kForward) {
    executor_.activations().put_away(unit, executor_.units()[unit].name);
    executor_.caches().put_away_rest(unit);
  }
  if (drop_later_[unit] || unforeseen_[unit]) release(unit);
}

void Driver::pause(int unit) {
  active_[unit] = 0;
  memory_.event(Op::kBackward, unit, true);
  if (running_) run_moves();
  if (drop_later_[unit] || unforeseen_[unit]) release(unit);
}

void Driver::pin(int unit) {
  if (!pinned_[unit]) {
    pinned_[unit] = true;
    ++off_plan_;
  }
  executor_.params().require(unit);
}

void Driver::hold(const std::vector<int>& units) {
  for (const int unit : units) ++held_[unit];
}

void Driver::let_go(const std::vector<int>& units) {
  for (const int unit : units) {
    if (--held_[unit] == 0 && active_[unit] == 0) release(unit);
  }
}

bool Driver::holds() const {
  return std::any_of(held_.begin(), held_.end(), [](int times) { return times > 0; });
}

bool Driver::owes() const {
  if (!running_) return false;
  const auto next = steps_->begin() + static_cast<ptrdiff_t>(next_);
  return !owed_.empty() || std::any_of(next, steps_->end(), [](const exec::PlannedStep& planned) {
    return exchanges_data(planned.step);
  });
}

void Driver::pass(size_t line) {
  if (line == kNotFound) return;
  run_to(line);
  executor_.run((*steps_)[line]);
  next_ = line + 1;
}

void Driver::release(int unit) {
  if (pinned_[unit] || held_[unit] > 0 || kept_[unit]) return;
  drop_later_[unit] = unforeseen_[unit] = false;
  if (is_followed(section_) && (running_ || carries_)) {
    if (executor_.params().whole(unit)) executor_.params().move_to(unit, Phase::kHold);
  } else {
    executor_.params().drop(unit);
  }
}

void Driver::run_to(size_t end) {
  while (next_ < end) {
    const Step& step = (*steps_)[next_].step;
    // If parameters move, every unit is entered before its gradients come. So if a unit's line is
    // passed and the unit was not entered, this rank skipped the unit. The unit's gradient move
    // must still run, because other ranks wait in it.
    if (step.op == Op::kBackward && step.mark != Mark::kBegin && gives_gradient(step.mark) &&
        executor_.table().moves_params() && active_[step.units.front()] == 0) {
      done_[step.units.front()] = true;
    }
    run((*steps_)[next_++]);
  }
}

void Driver::run_moves() {
  while (next_ < steps_->size() && !(*steps_)[next_].step.is_compute()) run((*steps_)[next_++]);
}

void Driver::run(const exec::PlannedStep& planned) {
  const Step& step = planned.step;
  if (runs_elsewhere(step)) return;
  if ((moves_gradients(step) && !is_forward(section_)) || sums_gradients(step)) {
    owed_.push_back(&planned);
    pump();
    return;
  }
  const bool frees = step.op == Op::kDrop || (step.op == Op::kMove && step.role == Role::kParam &&
                                              executor_.params().leaves(step.moves));
  const auto in_use = [this](int unit) {
    return pinned_[unit] || held_[unit] > 0 || (!finishing_ && active_[unit] > 0);
  };
  if (frees && in_use(step.units.front())) {
    drop_later_[step.units.front()] = true;
    return;
  }
  executor_.run(planned);
}

bool Driver::complete(const exec::PlannedStep& planned) const {
  if (finishing_ || section_ == Section::kUpdateEarly) return true;
  return std::all_of(planned.step.units.begin(), planned.step.units.end(),
                     [this](int unit) { return done_[unit]; });
}

void Driver::pump() {
  while (!owed_.empty() && complete(*owed_.front())) {
    executor_.run(*owed_.front());
    owed_.pop_front();
  }
}

void Driver::finish() {
  if (!running_) return;
  if (is_backward(section_)) memory_.event(Op::kBackward, 0, true);
  finishing_ = true;
  run_to(steps_->size());
  pump();
  // Later moves of the section may return a gradient to the place where backwards leave it, so only
  // the end shows which gradients are late. In a pipeline they may belong to any stage of the rank.
  if (is_backward(section_)) {
    std::fill(late_.begin(), late_.end(), false);
    for (const exec::PlannedStep& planned : plans_.at({section_})) {
      if (!moves_gradients(planned.step)) continue;
      const bool away = executor_.gradients().takes_away(planned.step.moves);
      for (const int unit : planned.step.units) {
        late_[unit] = away && executor_.gradients().late(unit);
      }
    }
  }
  if (!is_forward(section_)) {
    std::fill(pinned_.begin(), pinned_.end(), false);
  }
  for (size_t unit = 0; unit < active_.size(); ++unit) {
    if (!is_forward(section_) || drop_later_[unit] || unforeseen_[unit])
      release(static_cast<int>(unit));
    active_[unit] = 0;
  }
  carries_ = is_followed(section_);
  finishing_ = running_ = false;
  memory_.end_section();
}

std::vector<bool> Driver::late() const {
  std::vector<bool> late;
  for (size_t unit = 0; unit < late_.size(); ++unit) {  // leaves out gradients that were dropped
    late.push_back(late_[unit] && executor_.gradients().late(static_cast<int>(unit)));
  }
  return late;
}

void Driver::move_late(const std::vector<bool>& late, Section backward) {
  std::fill(late_.begin(), late_.end(), false);
  const auto again = [&](const exec::PlannedStep& planned) {
    const std::vector<int>& units = planned.step.units;
    if (moves_gradients(planned.step) &&
        std::any_of(units.begin(), units.end(), [&](int unit) { return late[unit]; })) {
      executor_.gradients().run(planned, true);
    }
  };
  for (const exec::PlannedStep& planned : plans_.at({backward})) again(planned);
  if (!running_) return;
  for (size_t i = 0; i < next_; ++i) again((*steps_)[i]);  // the update's lines before the norm
}

void Driver::abandon(bool replaces) {
  owed_.clear();
  running_ = finishing_ = carries_ = lost_hold_ = false;
  memory_.end_section();
  std::fill(pinned_.begin(), pinned_.end(), false);
  for (size_t unit = 0; unit < active_.size(); ++unit) {
    active_[unit] = 0;
    release(static_cast<int>(unit));
    if (replaces && kept_[unit] && held_[unit] == 0)
      executor_.params().drop(static_cast<int>(unit));
  }
}

}  // namespace penstock::engine
