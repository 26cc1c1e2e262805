#pragma once
// Monitor: collects the metrics of a rank's run. Rank 0 writes them to files. Used only by the
// model's thread.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "penstock/metrics.h"
#include "penstock/plan.h"
#include "src/engine/watch/run_files.h"
#include "src/exec/norm.h"
#include "src/trace/recorder.h"

namespace penstock::engine {

// Counters that grow during a run. A step's values are the differences between two such records.
struct SoFar {
  int64_t at_ns = 0, waits_ns = 0, comm_ns = 0, comm_bytes = 0, disk_read = 0, disk_written = 0;
  double disk_busy_s = 0.0;
};

// A trace that the user or the config requested.
struct TraceWish {
  std::string path;
  // Steps of this run, counted from 1. A load does not change the count.
  int64_t first = 1, last = 1;
  // Returns additional events. Its argument is the clock offset in ns.
  std::function<std::string(int64_t)> more;
  bool by_config = false;  // requested by "monitor.trace_first"
};

class Monitor {
 public:
  Monitor(const Config& config, std::shared_ptr<trace::Recorder> recorder, int rank, int size);

  // Counts the loss of a backward of the window. `loss` has one element.
  void saw(const at::Tensor& loss);
  void count(int64_t samples, int64_t tokens);
  void drop();  // drops the counts of the window
  const exec::Counted& counted() const { return counted_; }

  // Must be called when a forward of a training step begins. The first call starts the clock of the
  // first step.
  void begins();
  // Ends a step, and computes its metrics. `all`: the counts over all ranks. `now`: the counters so
  // far. `made` has the values of the other metrics.
  void end_step(StepMetrics made, const exec::Told& all, SoFar now);
  const StepMetrics& last() const { return last_; }
  int64_t applied() const { return applied_; }  // steps applied by this run
  // Ends the run: closes the files. Returns the requested trace if it was not written.
  std::optional<TraceWish> end();
  // Returns the tokens of the last step per rank.
  double tokens_of_rank() const { return static_cast<double>(last_.tokens) * copies_ / size_; }
  SoFar recorded() const;  // counters of the recorder

  trace::Recorder& recorder() { return *recorder_; }
  RunFiles* files() { return files_ ? &*files_ : nullptr; }  // null: no files are written

  const double started;  // seconds since 1970
  double flops_per_sample = 0.0, rank_peak = 0.0;
  double own_lr = kNotKnown;             // learning rate of a user's optimizer
  std::vector<double> forward_flops;     // by unit, per micro-batch; empty: not counted
  std::optional<Machine> machine;        // the measured machine ("monitor.machine")
  std::vector<std::string> stage_times;  // of each rank of this pipeline: the text of a TimedPlan
  bool said_dump = false;                // the dump file was announced on stderr
  std::set<std::string> dumped;          // calls whose first error was dumped
  // Requests a trace and replaces an earlier request. Recording starts at the trace's first step.
  void ask(TraceWish wish);
  // If the last step of the requested trace was recorded, returns the trace and forgets it.
  std::optional<TraceWish> take_finished();
  // In the exchange for the norm, the ranks agree on whether a trace ends with this step. say()
  // returns this rank's digit, and hear() removes the digit from the end of each rank's text.
  char say() const { return wish_ && applied_ + 1 >= wish_->last ? '1' : '0'; }
  void hear(std::vector<std::string>& all);
  // Returns the ranks whose trace does not end with this step. If there are such ranks, the
  // collective that writes the trace would never return.
  const std::vector<int>& without() const { return without_; }

 private:
  const std::shared_ptr<trace::Recorder> recorder_;
  const int16_t update_row_;
  const int size_, copies_;  // number of ranks; number of ranks that count the same samples
  const int64_t every_;
  exec::Counted counted_;
  SoFar before_;
  StepMetrics last_;
  int64_t applied_ = 0;
  std::optional<TraceWish> wish_;
  std::vector<int> without_;
  bool records_ = false;
  std::optional<RunFiles> files_;
};

}  // namespace penstock::engine
