#pragma once
// What a run would cost before it runs: every strategy and offload choice for a model, with its
// bytes per tier and its seconds per step on a described machine. Values; any thread.
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "penstock/export.h"

namespace penstock {

struct ModelTree;

// One rank's share of a machine: what it reaches, not what the data sheet says. The defaults are an
// accelerator of 2023 (a bit under half of 1 PFLOP/s in bf16, 3.3 TB/s, eight in a machine that has
// NVLink, PCIe 5, a 400 Gbit/s port each and a disk for two). All bandwidths in bytes/s.
struct Machine {
  double flops = 4e14;            // of forward and backward
  double local = 3e11;            // sent to ranks of this node
  double node = 4e10;             // sent across nodes
  double device_host = 5e10;      // copied, either way
  double host_disk = 3e9;         // read and written
  double host_memory = 3.5e10;    // for the CPU optimizer
  double device_memory = 2.5e12;  // for the device's
  double overlap = 1.0;  // share of a lane's seconds that do not slow down what computes meanwhile
  // A rank of this CPU engine, roughly: what is chosen depends on the order of these numbers only.
  static Machine cpu() { return {1e11, 2e9, 1e9, 5e9, 1e9, 8e9, 8e9}; }
};

// Of a file that `penstock bench` wrote: an object with these names; what it does not have, or has
// as null, is as `otherwise` says. Throws ConfigError with the file's name.
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
  std::string strategy, optimizer, params;  // the tiers as in `offload`: "none" "host" "disk"
  int64_t device = 0, host = 0, disk = 0;
  int64_t memory = 0;     // device and host together
  double seconds = 0;     // of one step, by the simulator
  std::string longest{};  // what the step waits for most: "forward, local link"
  bool fits = true;
  bool tight = false;        // with less than a tenth of some limit to spare
  std::string over{};        // where it does not fit: "device 1.50 GiB over"
  std::string text() const;  // `strategy "zero3", offload.optimizer "host", offload.params "none"`
};

struct PlanQuestion {
  Config config;
  int world_size = 1;
  double tokens = 0;  // per rank and step
  Machine machine;
  Room room;  // plan_report() takes that of config.memory
};

struct PlanReport {
  std::vector<Alternative> alternatives;    // best first: those that fit (the tight ones after the
                                            // others), the fastest of them
  std::map<std::string, std::string> same;  // strategies left out: equal, on this mesh, to another
  std::string text;                         // as a table
};

PENSTOCK_API const std::vector<std::string>& strategy_names();

// Every strategy and tier, whatever the config asks for; its table counts for its own strategy. The
// tensors of `tree` may be on the meta device. Throws ConfigError.
PENSTOCK_API PlanReport plan_report(const ModelTree& tree, const PlanQuestion& question);

// Of a stage of a pipeline and one micro-batch.
struct StageSeconds {
  double forward = 0, backward = 0;
};

// Idle over busy time of a pipeline's ranks, from the first forward to the last backward of a step,
// as the simulator has it where messages take no time. Stage s is on rank s modulo the ranks.
// Throws ConfigError: an unknown schedule, and shapes that it does not have.
PENSTOCK_API double simulated_bubble(const std::string& schedule, int num_ranks, int num_micro,
                                     const std::vector<StageSeconds>& stages);

}  // namespace penstock
