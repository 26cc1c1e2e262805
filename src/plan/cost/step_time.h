#pragma once
// Predicted time of a step on a described machine. Phases follow one another. Within a phase
// everything overlaps, so a phase takes as long as its longest lane. The result serves to compare
// choices; it is not a precise time.
#include <cstdint>
#include <string>

#include "penstock/plan.h"
#include "src/plan/cost/simulator.h"

namespace penstock {

// Bytes of memory traffic per updated parameter: an update reads and writes two fp32 moments and
// the master, reads a bf16 gradient and writes a bf16 parameter.
inline constexpr double kUpdateBytes = 28;
// The codec of a lossy wire takes as long as this many bytes of memory traffic per value that it
// encodes or decodes. It runs on the lane of the exchange, before and after the exchange. Estimated
// from benchmarks/README.md: about 1e9 values/s for each rank of a machine that gives its optimizer
// 10 GB/s.
inline constexpr double kCodecBytes = 10;

// Work of a rank in one step.
struct Work {
  double tokens = 0;           // of all the rank's micro-batches
  int64_t params = 0;          // of the model; a forward takes 2 FLOPs per parameter and token
  int64_t trained_params = 0;  // a backward takes 4 FLOPs for these, 2 for frozen ones
  int64_t updated_params = 0;  // updated by this rank's optimizer
  bool updates_on_host = false;
  int64_t again_params = 0;  // of units that are recomputed in backward
};

struct StepTime {
  double forward = 0, backward = 0, update = 0;  // seconds
  // The parts of forward and backward that compute forwards again and wait for exchanges of layers.
  double again = 0, layers = 0;
  std::string longest;  // the longest part: "forward, host-disk link"
  double total() const { return forward + backward + update; }
};

// `ledger` has the bytes on each link.
StepTime step_time(const Work& work, const Ledger& ledger, const Machine& machine);

}  // namespace penstock
