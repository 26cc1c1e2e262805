#pragma once
// Observer: feeds a core's values to its monitor and writes run.json, traces and dumps
// (metrics.cpp, prediction.cpp).
#include <optional>
#include <string>
#include <vector>

#include "src/engine/step/core_state.h"
#include "src/engine/watch/monitor.h"
#include "src/plan/cost/pipeline_timeline.h"
#include "src/trace/chrome.h"

namespace penstock {

struct Core::State::Observer {
  struct Prediction {
    double step_s = 0.0;
    trace::Predicted lines;  // seconds of plan lines and compute, by the text of their events
  };

  // [all ranks] Makes the monitor and compares the ranks' clocks. Must be called before the first
  // step.
  void begin();
  // Writes run.json. Called when the run begins, and again after step one, which fixes the plans.
  void describe();
  // [all ranks] Ends an applied step and begins the next one. Writes the requested trace if it ends
  // with this step.
  void end_step(const std::vector<OptimizerConfig>& groups);
  // Simulates a step of `batch.accumulate` micro-batches. Returns nothing if `monitor.machine` is
  // not set, or until FLOPs or tokens of a forward have been counted (in a pipeline: on each of its
  // ranks). If only tokens were counted, assumes 2 FLOPs per parameter and token for a forward.
  std::optional<Prediction> predict() const;
  // Returns the events as part of a Chrome trace.
  std::string events_of(const std::vector<trace::Event>& events);
  // Must be called after an error in a `call` ("forward"). Writes the last steps to a file and
  // prints the file's path to stderr once. A script may catch errors in a loop, so there is only
  // one write for each kind of call.
  void dump(const std::string& call);
  // Ends the run. No step may follow.
  void end();

  State& state;

 private:
  // [all ranks] Tells the ranks of each pipeline how long the lines of their plans take.
  void share_times();
  // Returns the plan of a window and the seconds of its lines. Returns nothing if neither FLOPs nor
  // tokens are known.
  std::optional<TimedPlan> own_times() const;
  void write_trace(const engine::TraceWish& wish);
  void say(const std::string& what) const;
  // Writes a trace of this rank only.
  void write_own(const std::string& path, const std::vector<trace::Event>& events);
};

}  // namespace penstock
