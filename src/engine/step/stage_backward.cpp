#include "src/engine/step/stage_backward.h"

#include <unordered_map>

#include "src/engine/step/planning.h"

namespace penstock {

// The section has its own lines in the plan, which use parameters and move no gradients.
void Core::State::StageBackward::inputs(engine::SplitBackward& split) const {
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

void Core::State::StageBackward::weights(engine::SplitBackward& split) const {
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
  split.weights(
      {[&] { state.in_hook([&] { state.backward_enter(0, {}, {}); }); },
       [&](const auto& leaves, const auto& at) { state.in_hook([&] { enter(leaves, at); }); },
       [&](const auto& leaves) { state.in_hook([&] { leave(leaves); }); }});
}

// See State::complete_open() for when a unit's use has ended.
void Core::State::StageBackward::enter(int unit, const engine::GraphPlace& since,
                                       const engine::GraphPlace& at) const {
  std::erase_if(state.open_units, [&](int open) {
    const std::optional<engine::GraphPlace>& entered =
        state.progress[static_cast<size_t>(open)].entered;
    if (open == unit || (entered && at.follows(*entered))) return false;
    state.driver->pause(open);
    return true;
  });
  std::optional<engine::GraphPlace>& own = state.progress[static_cast<size_t>(unit)].entered;
  if (!own || own->follows(since)) own = since;  // a recomputed forward has a later place
  state.driver->enter(Op::kBackward, unit);
  if (unit != 0 && !state.order->spans(unit)) {
    std::erase(state.open_units, unit);
    state.open_units.push_back(unit);
  }
}

}  // namespace penstock
