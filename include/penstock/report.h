#pragma once
// Report: what a core says about its run.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// Bytes on this rank: predicted per strategy, and what the running one took at most. In memory
// (device and host) by role, and in swap files.
struct LedgerEntry {
  int64_t param = 0, grad = 0, optim = 0, buffers = 0, total = 0;
  int64_t disk = 0;
  int64_t device = 0, host = 0;  // the peaks of `total`, by tier
  int64_t act = 0;  // measured only: inputs of recomputed units in host memory, beside the total
  int64_t exchanges = 0;  // with peers in a step; measured: in the last one
};
struct LedgerReport {
  std::map<std::string, LedgerEntry> predicted;
  LedgerEntry measured;
  int64_t disk_read = 0, disk_written = 0;  // so far
  std::string strategy;
};

// A view of a core, for the thread that runs the model.
class PENSTOCK_API Report {
 public:
  explicit Report(const Core& core) : state_(core.state_) {}
  explicit Report(std::shared_ptr<Core::State> state) : state_(std::move(state)) {}

  double grad_norm() const;       // of the last applied step, averaged gradient, before clipping
  double loss_scale() const;      // of the next backward; 1 without fp16
  int64_t skipped_steps() const;  // for overflow
  std::string overflow() const;   // what the last skipped step says, or empty

  LedgerReport ledger() const;
  std::string explain() const;  // every effective setting, the table, the units, the plans

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
