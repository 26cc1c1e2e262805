#include "src/engine/step/backward_end.h"

#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

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

}  // namespace penstock
