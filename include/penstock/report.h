#pragma once
// Report: numbers and texts about a core's run.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// Peak bytes on this rank: for each role in memory (device plus host), and in swap files. They are
// predicted for each strategy, and measured for the strategy in use.
struct LedgerEntry {
  int64_t param = 0, grad = 0, optim = 0, buffers = 0, total = 0;
  int64_t disk = 0;
  int64_t device = 0, host = 0;  // the peaks of `total`, by tier
  int64_t memory = 0;            // peak of device and host together; budgets on the CPU limit it
  int64_t act = 0;  // measured only: inputs of recomputed units in host memory; not in `total`
  // Measured only: cached tokens that move (offload.cache). In host memory, with the tensors in
  // which they are assembled if that is where the model computes; not in `total`.
  int64_t cache = 0;
  // Peak bytes of the tensors with which the model computes on the device: what a forward keeps for
  // its backward, gradients between layers, logits, messages. Known after the second applied step,
  // as of that step. 0 before, if a rank has several stages, and if another engine of the process
  // trained or counted at the time. On an accelerator, a peak between two events of units is seen
  // only if it raises the peak of the run, so the number may be too small.
  int64_t activations = 0;
  // Predicted only, 0 while `activations` is: the peak of `device` with activations, and the peak
  // of `memory` with activations and `act`.
  int64_t step_device = 0, step_memory = 0;
  int64_t exchanges = 0;  // exchanges with peers in one step; measured: in the last step
};
// What the memory of this process consists of now, in bytes. The parts are not exact: `heap` also
// counts small buffers of `engine`, and the last sixteenth of a large buffer may never have been
// touched. The rest of `process` is Python objects, stacks and small buffers of threads.
struct ResidentMemory {
  int64_t process = 0;    // resident pages
  int64_t engine = 0;     // the engine's buffers in host memory, used or kept for reuse;
                          // on the CPU the device is host memory too
  int64_t libraries = 0;  // pages of files: the code of Python, torch and the engine
  int64_t shared = 0;     // memory that ranks of this host share
  int64_t heap = 0;       // in use in the heap of malloc: tensors and objects of Python and torch
  int64_t heap_free = 0;  // resident in that heap but freed: malloc keeps it for later tensors
};
struct LedgerReport {
  std::map<std::string, LedgerEntry> predicted;
  LedgerEntry measured;
  ResidentMemory resident;
  int64_t disk_read = 0, disk_written = 0;  // bytes since the start
  std::string strategy;
};

// A view of a core, for the model's thread.
class PENSTOCK_API Report {
 public:
  explicit Report(const Core& core) : state_(core.state_) {}
  explicit Report(std::shared_ptr<Core::State> state) : state_(std::move(state)) {}

  double grad_norm() const;   // of the averaged gradient in the last applied step, before clipping
  double loss_scale() const;  // of the next backward; 1 without fp16
  int64_t skipped_steps() const;  // steps skipped because of overflow
  std::string overflow() const;   // text about the last skipped step, or empty

  LedgerReport ledger() const;
  std::string explain() const;  // every effective setting, the table, the units, the plans

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
