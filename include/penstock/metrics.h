#pragma once
// Metrics: what a run says of each step, from values that the step already has; and its timeline.
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

inline constexpr double kNotKnown = NAN;

// Of one applied step. Seconds and bytes are this rank's; loss, samples and tokens all ranks'.
struct PENSTOCK_API StepMetrics {
  int64_t step = 0;
  double time = 0.0;        // when it ended, seconds since 1970
  double step_s = 0.0;      // since the end of the step before
  double loss = kNotKnown;  // mean over the window's backwards and the data ranks
  double grad_norm = 0.0, lr = 0.0, loss_scale = 1.0;
  int64_t skipped_steps = 0;
  int64_t samples = 0, tokens = 0;  // 0: nobody counted them
  double flops = 0.0;               // of the model, all ranks'; 0: nobody counted them
  double peak_flops = 0.0;          // of all ranks, a second; 0: not known
  double exposed_s = 0.0;           // the model's thread waited: for peers, updates, the disk
  double exposed_comm_s = 0.0;      // of this, for gathers, reductions and the norm
  int64_t comm_bytes = 0;           // sent to peers
  int64_t disk_read_bytes = 0, disk_written_bytes = 0;
  double disk_busy_s = 0.0;  // the disk had requests
  // Now, by role, in memory; the most so far, by tier.
  int64_t param_bytes = 0, grad_bytes = 0, optim_bytes = 0, buffer_bytes = 0;
  int64_t device_peak_bytes = 0, host_peak_bytes = 0, disk_bytes = 0;

  double samples_per_s() const { return rate(static_cast<double>(samples)); }
  double tokens_per_s() const { return rate(static_cast<double>(tokens)); }
  double mfu() const { return peak_flops > 0.0 && flops > 0.0 ? rate(flops) / peak_flops : NAN; }
  double disk_gb_per_s() const {
    const auto bytes = static_cast<double>(disk_read_bytes + disk_written_bytes);
    return disk_busy_s > 0.0 ? bytes / disk_busy_s * 1e-9 : kNotKnown;
  }

  // By the names that files have (docs/monitoring.md), in their order; not a number where it is not
  // known. Whole numbers are exact up to 2^53.
  std::vector<std::pair<std::string, double>> values() const;

 private:
  double rate(double amount) const {
    return step_s > 0.0 && amount > 0.0 ? amount / step_s : kNotKnown;
  }
};

// Of the events of a row of the timeline.
struct RowSum {
  std::string row, kind;  // as a trace names them
  int64_t count = 0, bytes = 0;
  double seconds = 0.0;
};

// A view of a core, for the thread that runs the model.
class PENSTOCK_API Metrics {
 public:
  explicit Metrics(const Core& core) : state_(core.state_) {}

  // Of what the window's forwards compute on this rank.
  void count(int64_t samples, int64_t tokens);
  // Model FLOPs of a sample (forward and backward), and the peak of one rank a second; 0: unknown.
  void set_flops(double per_sample, double rank_peak);
  // Of the step that comes, where the optimizer is the user's.
  void set_lr(double lr);
  // FLOPs of one micro-batch's forward on this rank, by unit; while it runs, unit() is the
  // innermost that computes. From them seconds are predicted where `monitor.machine` says how.
  void set_work(std::vector<double> forward_flops);
  int unit() const;
  // Of the last applied step; step 0 before the first.
  const StepMetrics& last() const;
  // Everything so far is in the files.
  void flush();
  // Of all that was recorded so far on this rank, whether it is kept or not.
  std::vector<RowSum> sums() const;

  // The events of the last steps of this rank (see src/trace/recorder.h) into a Chrome trace, which
  // Perfetto opens.
  // Throws RuntimeFault where the file cannot be written.
  void write_last(const std::string& path) const;
  // [all ranks] The next `steps` whole steps of all ranks; rank 0 writes the file when the last of
  // them ends. `more`, if any, is called then on each rank that gave it, with what is added to its
  // steady clock (ns) to have rank 0's; what it returns, events of a Chrome trace separated by
  // commas, is put beside this rank's.
  void trace(const std::string& path, int64_t steps, std::function<std::string(int64_t)> more = {});

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
