#pragma once
// Metrics: numbers about each step, computed from values that the step already has, and the run's
// timeline.
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

// Numbers of one applied step. Seconds and bytes are of this rank; loss, samples and tokens are
// over all ranks.
struct PENSTOCK_API StepMetrics {
  int64_t step = 0;
  double time = 0.0;        // end of the step, seconds since 1970
  double step_s = 0.0;      // since the end of the previous step
  double loss = kNotKnown;  // mean over the window's backwards and the data ranks
  double grad_norm = 0.0, lr = 0.0, loss_scale = 1.0;
  int64_t skipped_steps = 0;
  int64_t samples = 0, tokens = 0;  // 0: not counted
  double flops = 0.0;               // FLOPs of the model over all ranks; 0: not counted
  double peak_flops = 0.0;          // FLOPs per second over all ranks; 0: not known
  double exposed_s = 0.0;       // time that the model's thread waited for peers, updates and disk
  double exposed_comm_s = 0.0;  // part of exposed_s: waits for gathers, reductions and the norm
  int64_t comm_bytes = 0;       // sent to peers
  int64_t disk_read_bytes = 0, disk_written_bytes = 0;
  double disk_busy_s = 0.0;  // time during which the disk had requests
  // First the bytes in memory now, by role; then the peaks so far, by tier.
  int64_t param_bytes = 0, grad_bytes = 0, optim_bytes = 0, buffer_bytes = 0;
  int64_t device_peak_bytes = 0, host_peak_bytes = 0, disk_bytes = 0;

  double samples_per_s() const { return rate(static_cast<double>(samples)); }
  double tokens_per_s() const { return rate(static_cast<double>(tokens)); }
  double mfu() const { return peak_flops > 0.0 && flops > 0.0 ? rate(flops) / peak_flops : NAN; }
  double disk_gb_per_s() const {
    const auto bytes = static_cast<double>(disk_read_bytes + disk_written_bytes);
    return disk_busy_s > 0.0 ? bytes / disk_busy_s * 1e-9 : kNotKnown;
  }

  // Returns the values with their names in files (docs/monitoring.md), in file order. An unknown
  // value is NaN. Whole numbers are exact up to 2^53.
  std::vector<std::pair<std::string, double>> values() const;

 private:
  double rate(double amount) const {
    return step_s > 0.0 && amount > 0.0 ? amount / step_s : kNotKnown;
  }
};

// Sum over the events of one timeline row.
struct RowSum {
  std::string row, kind;  // named as in a trace
  int64_t count = 0, bytes = 0;
  double seconds = 0.0;
};

// A view of a core, for the model's thread.
class PENSTOCK_API Metrics {
 public:
  explicit Metrics(const Core& core) : state_(core.state_) {}

  // Adds to the samples and tokens that the window's forwards compute on this rank.
  void count(int64_t samples, int64_t tokens);
  // Sets the model's FLOPs per sample (forward and backward) and the peak FLOPs per second of one
  // rank; 0: unknown.
  void set_flops(double per_sample, double rank_peak);
  // Sets the lr of the next step if the user's optimizer does the update.
  void set_lr(double lr);
  // Sets the FLOPs of one micro-batch's forward on this rank, by unit. Seconds are predicted from
  // these FLOPs if `monitor.machine` names a machine file. During a forward, unit() returns the
  // innermost unit that is computing.
  void set_work(std::vector<double> forward_flops);
  int unit() const;
  // Returns the numbers of the last applied step; `step` is 0 before the first.
  const StepMetrics& last() const;
  // Writes everything recorded so far to the files.
  void flush();
  // Returns sums over all events so far on this rank, including events that were not kept.
  std::vector<RowSum> sums() const;

  // Writes the events of this rank's last steps (src/trace/recorder.h) as a Chrome trace, which
  // Perfetto opens. Throws RuntimeFault if the file cannot be written.
  void write_last(const std::string& path) const;
  // [all ranks] Records the next `steps` whole steps of all ranks. Rank 0 writes the file when the
  // last of these steps ends. Each rank that passed `more` then calls it with the offset (ns) from
  // its own steady clock to the clock of rank 0. `more` returns additional events for that rank, as
  // Chrome trace events separated by commas.
  void trace(const std::string& path, int64_t steps, std::function<std::string(int64_t)> more = {});

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
