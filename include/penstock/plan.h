#pragma once
// Predicted cost of a run: bytes per tier and seconds per step on a described machine, for every
// strategy and offload choice of a model. Plain values, usable from any thread.
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "penstock/export.h"

namespace penstock {

struct ModelTree;

// One rank's share of a machine. The rates are achieved rates, not data-sheet peaks. The defaults
// describe an accelerator of 2023 that has a peak of 1 PFLOP/s in bf16 (and achieves a bit under
// half), 3.3 TB/s of memory bandwidth, PCIe 5 and a 400 Gbit/s port. Eight of them share a machine
// with NVLink, and two share a disk. All bandwidths are in bytes/s.
struct Machine {
  double flops = 4e14;            // FLOP/s of forward and backward
  double local = 3e11;            // sent to ranks of the same node
  double node = 4e10;             // sent across nodes
  double device_host = 5e10;      // copied, in either direction
  double host_disk = 3e9;         // read and written
  double host_memory = 3.5e10;    // used by the CPU optimizer
  double device_memory = 2.5e12;  // used by the device's optimizer
  double overlap = 1.0;  // share of a lane's seconds that does not slow down concurrent computing
  // Speeds of generation; 0 = not measured.
  double one_row = 0;    // bytes/s of weights in products with one row
  double rows_16 = 0;    // FLOP/s of products with 16 rows
  double attention = 0;  // bytes/s of keys and values to which one token of each sequence attends
  // Returns rough numbers for one rank on CPUs. Choices depend only on how the numbers compare with
  // each other.
  static Machine cpu() { return {1e11, 2e9, 1e9, 5e9, 1e9, 8e9, 8e9}; }
};

// Reads a file that `penstock bench` wrote: a JSON object with the names of these fields. Absent or
// null values are taken from `otherwise`. Throws ConfigError with the file's name.
PENSTOCK_API Machine read_machine(const std::string& path, const Machine& otherwise);

// Limits in bytes per rank.
struct Room {
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  int64_t device = kNoLimit, host = kNoLimit, disk = kNoLimit;
  int64_t memory = kNoLimit;  // device and host together
  std::string text() const;   // "device 4.00 GiB, disk 80.00 GiB"
};

// One way to train. Bytes are peaks on one rank.
struct Alternative {
  std::string strategy, optimizer, params;  // tiers as in `offload`: "none" "host" "disk"
  std::string gradients = "none";
  int64_t device = 0, host = 0, disk = 0;
  int64_t memory = 0;                // device and host together
  double seconds = 0;                // of one step, as the simulator predicts
  double forward = 0, backward = 0;  // these parts of the step, in seconds
  // Seconds of both parts in which ranks compute forwards again and wait for exchanges of layers.
  double again = 0, layers = 0;
  std::string longest{};  // the longest part of the step: "forward, local link"
  bool fits = true;
  bool tight = false;  // less than a tenth of some limit is left
  std::string over{};  // if it does not fit: "device 1.50 GiB over"
  // `strategy "zero3", offload.optimizer "host", offload.params "none", offload.gradients "none"`
  std::string text() const;
};

struct PlanQuestion {
  Config config;
  int world_size = 1;
  double tokens = 0;  // per rank and step
  Machine machine;
  Room room;  // plan_report() uses config.memory instead
};

// The fastest alternative that fits with one value of "comm.codec".
struct CodecAlternative {
  std::string codec;
  Alternative best;  // predicted for its steps with encoded exchanges
  // Mean seconds per step. If the codec needs exact steps, 15% of the steps are exact.
  double average = 0;
};

struct PlanReport {
  // First those that fit, then those that fit tightly, then the others. Within each kind, the
  // fastest is first.
  std::vector<Alternative> alternatives;
  std::map<std::string, std::string>
      same;  // omitted strategy -> a listed strategy that is equal on this mesh
  // One entry per codec that fits and that the optimizer and the precision can use. Empty if there
  // are no other ranks, or if the config itself asks for lossy wires.
  std::vector<CodecAlternative> codecs{};
  std::string text;  // the alternatives as a table, and what codecs would change
};

PENSTOCK_API const std::vector<std::string>& strategy_names();

// Compares every strategy and every tier, including those that the config does not select. The
// config's table applies only to the config's strategy. The tensors of `tree` may be on the meta
// device. Throws ConfigError.
PENSTOCK_API PlanReport plan_report(const ModelTree& tree, const PlanQuestion& question);

// Seconds of one pipeline stage for one micro-batch.
struct StageSeconds {
  double forward = 0, backward = 0;
};

// Returns the ratio of idle to busy time of a pipeline's ranks, from the first forward to the last
// backward of a step. The simulator computes it for messages that take no time. Stage s is on rank
// s modulo num_ranks. Throws ConfigError for an unknown schedule and for shapes that the schedule
// does not allow.
PENSTOCK_API double simulated_bubble(const std::string& schedule, int num_ranks, int num_micro,
                                     const std::vector<StageSeconds>& stages);

}  // namespace penstock
