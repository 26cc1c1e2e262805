#include "src/engine/step/backward_end.h"

#include <unordered_map>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/step/planning.h"

namespace penstock {

Core::State::BackwardEnd::BackwardGuard::BackwardGuard(std::weak_ptr<State> of,
                                                       std::shared_ptr<void> thread)
    : state(std::move(of)), running(std::move(thread)) {}

Core::State::BackwardEnd::BackwardGuard::~BackwardGuard() {
  const auto self = state.lock();
  if (ended || !self || self->closed || !self->window->armed()) return;
  const bool by_engine = !begun || self->fault != nullptr || self->model_ranks.stages;
  self->raised = by_engine ? Raised::kByEngine : Raised::kByModel;
  try {
    for (exec::UnitState& unit : self->executor->units()) {
      if (!by_engine) self->executor->gradients().pack(unit);
    }
    self->border->show_gradients();
  } catch (const std::exception&) {  // the device failed, and the caller gets its error
    self->raised = Raised::kByEngine;
  }
}

void Core::State::BackwardEnd::after_error(const char* call, bool drops) {
  if (state.raised == Raised::kNone) return;
  if (state.raised == Raised::kByEngine) {
    if (drops && state.window->seen() == 0) return state.drop_gradients();
    throw RuntimeFault(concat("[engine::", call,
                              "] an error of the engine ended the last backward, so the gradients "
                              "of its window are incomplete. Call zero_grad(), which drops them, "
                              "and run the window again"));
  }
  state.raised = Raised::kByEngine;  // stays if the remaining moves throw
  state.open_units.clear();
  for (Progress& unit : state.progress) unit.forwards = 0;
  state.driver->finish();
  state.window->on(engine::Call::kBackwardEnd);
  state.raised = Raised::kNone;
}

bool Core::State::BackwardEnd::unseen() {
  if (state.window->seen() > state.seen_before || state.window->armed()) return false;
  state.start_backward(false);
  state.end_backward();
  return true;
}

// The backward counts on the other stages, so it must count here even if it reached no hook of this
// rank.
void Core::State::BackwardEnd::of_stage(int64_t micro) {
  unseen();
  if (state.window->seen() > state.seen_before) state.window->set_micro(micro);
}

// The section has its own lines in the plan, which use parameters and move no gradients.
void Core::State::BackwardEnd::inputs_of_stage(engine::SplitBackward& split) {
  engine::Driver& driver = *state.driver;
  state.open_units.clear();
  for (Progress& unit : state.progress) unit.entered.reset();
  driver.begin(Section::kBackward, Planning{state}.action_of(Section::kBackward));
  try {
    if (state.unit_events && split.splits()) {
      driver.enter(Op::kBackward, 0);
      for (const int unit : state.order->spanning()) {
        state.order->done() ? driver.enter(Op::kBackward, unit) : driver.pin(unit);
      }
    }
    split.inputs();
    driver.finish();
  } catch (...) {
    driver.abandon();
    throw;
  }
  state.open_units.clear();
}

void Core::State::BackwardEnd::weights_of_stage(engine::SplitBackward& split) {
  std::unordered_map<const c10::TensorImpl*, int> unit_of;
  for (size_t unit = 0; unit < state.executor->units().size(); ++unit) {
    for (const exec::Flat& flat : state.executor->units()[unit].flats) {
      for (const exec::Slot& slot : flat.slots) {
        unit_of[slot.param.unsafeGetTensorImpl()] = static_cast<int>(unit);
      }
    }
  }
  const auto units_of = [&](const std::vector<at::Tensor>& leaves) {
    std::vector<int> units;  // a leaf that is no parameter of the model belongs to none
    for (const at::Tensor& leaf : leaves) {
      const auto found = unit_of.find(leaf.unsafeGetTensorImpl());
      if (found != unit_of.end()) units.push_back(found->second);
    }
    return units;
  };
  std::vector<int> left(state.progress.size(), 0);  // by unit: leaves without a gradient yet
  for (const int unit : units_of(split.leaves())) ++left[static_cast<size_t>(unit)];
  const auto enter = [&](const std::vector<at::Tensor>& leaves, const engine::GraphPlace& at) {
    for (const int unit : units_of(leaves)) {
      if (!state.progress[static_cast<size_t>(unit)].entered) state.backward_enter(unit, {}, at);
    }
  };
  const auto leave = [&](const std::vector<at::Tensor>& leaves) {
    for (const int unit : units_of(leaves)) {
      const bool is_open = state.progress[static_cast<size_t>(unit)].entered.has_value();
      if (--left[static_cast<size_t>(unit)] > 0 || !is_open) continue;
      if (unit != 0 && !state.order->spans(unit)) state.unit_complete(unit);
    }
  };
  split.weights({[&] { state.in_hook([&] { state.backward_enter(0, {}, {}); }); },
                 [&](const auto& leaves, const auto& at) {
                   state.in_hook([&] { enter(leaves, at); });
                 },
                 [&](const auto& leaves) { state.in_hook([&] { leave(leaves); }); }});
}

}  // namespace penstock
