#pragma once
// Monitor: what a rank counts of its run, and rank 0's files of it. Compute thread only.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "penstock/metrics.h"
#include "penstock/plan.h"
#include "src/engine/watch/run_files.h"
#include "src/exec/norm.h"
#include "src/trace/recorder.h"

namespace penstock::engine {

// What grows as a run goes on; of a step is the difference.
struct SoFar {
  int64_t at_ns = 0, waits_ns = 0, comm_ns = 0, comm_bytes = 0, disk_read = 0, disk_written = 0;
  double disk_busy_s = 0.0;
};

// A trace that somebody asked for.
struct TraceWish {
  std::string path;
  int64_t first = 1, last = 1;  // steps that this run makes, from 1, also after a load
  std::function<std::string(int64_t)> more;
  bool by_config = false;
};

class Monitor {
 public:
  Monitor(const Config& config, std::shared_ptr<trace::Recorder> recorder, int rank, int size);

  // The loss of a backward of the window: one element.
  void saw(const at::Tensor& loss);
  void count(int64_t samples, int64_t tokens);
  void drop();  // the window
  const exec::Counted& counted() const { return counted_; }

  // A forward of a training step begins: before the first one nothing is a step's time.
  void begins();
  // What ranks counted and what there is so far become the step's; `made` has the rest.
  void end_step(StepMetrics made, const exec::Told& all, SoFar now);
  const StepMetrics& last() const { return last_; }
  int64_t applied() const { return applied_; }  // by this run
  // No step comes any more: files are whole. Returns what was asked for and not written.
  std::optional<TraceWish> end();
  // Of that step, on this rank.
  double tokens_of_rank() const { return static_cast<double>(last_.tokens) * copies_ / size_; }
  SoFar recorded() const;  // of the recorder

  trace::Recorder& recorder() { return *recorder_; }
  RunFiles* files() { return files_ ? &*files_ : nullptr; }  // null: there are none

  const double started;  // seconds since 1970
  double flops_per_sample = 0.0, rank_peak = 0.0;
  double own_lr = kNotKnown;          // where the optimizer is the user's
  std::vector<double> forward_flops;  // by unit, of a micro-batch; empty: nobody counted them
  std::optional<Machine> machine;     // that was measured
  bool said_dump = false;
  // From now on, or from its first step; in place of what was asked for before.
  void ask(TraceWish wish);
  // What was asked for has all its steps: it is no wish any more.
  std::optional<TraceWish> take_finished();
  // With the norm ranks tell each other whether a trace ends with this step: a digit, and by rank
  // its place in what all say, of which it is taken.
  char say() const { return wish_ && applied_ + 1 >= wish_->last ? '1' : '0'; }
  void hear(std::vector<std::string>& all);
  // Ranks that did not say so: what is collected from all of them would never come.
  const std::vector<int>& without() const { return without_; }

 private:
  const std::shared_ptr<trace::Recorder> recorder_;
  const int16_t update_row_;
  const int size_, copies_;  // ranks; of them, that count the same samples
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
