#pragma once
// Observer: what a core tells its monitor, and what is written of that (metrics.cpp,
// prediction.cpp).
#include <optional>
#include <string>
#include <vector>

#include "src/engine/step/core_state.h"
#include "src/engine/watch/monitor.h"
#include "src/trace/chrome.h"

namespace penstock {

struct Core::State::Observer {
  struct Prediction {
    double step_s = 0.0;
    trace::Predicted lines;  // of each line and of what computes, by the texts that events have
  };

  // [all ranks] Before the first step: there is a monitor, and clocks are compared.
  void begin();
  // What stays as it is, for run.json: when the run begins, and when the plans of its order are
  // made.
  void describe();
  // [all ranks] One was applied, and the next begins; writes a trace that ends with it.
  void end_step(const std::vector<OptimizerConfig>& groups);
  // What the simulator says of a step. Nothing without `monitor.machine`, in pipelines, and before
  // a forward was counted: its FLOPs, or its tokens, of which each takes 2 FLOPs a parameter then.
  // Of a window as the config has it; sums of activations over tensor ranks take no time in it.
  std::optional<Prediction> predict() const;
  // As part of a Chrome trace.
  std::string events_of(const std::vector<trace::Event>& events);
  // After an error: where the last steps are, on stderr, once.
  void dump();
  // No step comes any more.
  void end();

  State& state;

 private:
  void write_trace(const engine::TraceWish& wish);
  void say(const std::string& what) const;
  // This rank's alone.
  void write_own(const std::string& path, const std::vector<trace::Event>& events);
};

}  // namespace penstock
