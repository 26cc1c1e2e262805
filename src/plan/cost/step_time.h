#pragma once
// How long a step takes on a described machine. Within a phase everything overlaps, so a phase
// takes as long as its longest lane; phases follow one another. It ranks choices; it is no
// stopwatch.
#include <cstdint>
#include <string>

#include "penstock/plan.h"
#include "src/plan/cost/simulator.h"

namespace penstock {

// Of memory, that an update moves for a parameter: two fp32 moments and the master read and
// written, a bf16 gradient in, a bf16 parameter out.
inline constexpr double kUpdateBytes = 28;

// What a rank computes in one step.
struct Work {
  double tokens = 0;           // of all its micro-batches
  int64_t params = 0;          // of the model: a forward is 2 FLOPs a parameter and token
  int64_t trained_params = 0;  // a backward 4 for these, 2 for frozen ones
  int64_t updated_params = 0;  // by this rank's optimizer
  bool updates_on_host = false;
};

struct StepTime {
  double forward = 0, backward = 0, update = 0;  // seconds
  std::string longest;                           // what takes most: "forward, host-disk link"
  double total() const { return forward + backward + update; }
};

// `ledger` gives the bytes on each link.
StepTime step_time(const Work& work, const Ledger& ledger, const Machine& machine);

}  // namespace penstock
