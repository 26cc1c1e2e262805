#pragma once
// Watching: what a core tells its monitor, and what is written of that (metrics.cpp).
#include <string>
#include <vector>

#include "src/engine/monitor.h"
#include "src/engine/state.h"

namespace penstock {

struct Core::State::Watching {
  // [all ranks] Before the first step: there is a monitor, and clocks are compared.
  void begin();
  // What stays as it is, for run.json: when the run begins, and when the plans of its order are
  // made.
  void describe();
  // [all ranks] One was applied, and the next begins; writes a trace that ends with it.
  void end_step(const std::vector<OptimizerConfig>& groups);
  // As part of a Chrome trace.
  std::string events_of(const std::vector<trace::Event>& events);

  State& state;

 private:
  void write_trace(const engine::TraceWish& wish);
};

}  // namespace penstock
