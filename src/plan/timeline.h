#pragma once
// Timeline: when all ranks of a pipeline do what, from their plans. A line begins when what it
// needs has ended and its lane is free; a rank has lanes that compute, gather, reduce and update,
// and one to send to either side. Nobody is late, links do not share, and sums of activations over
// tensor ranks cost nothing: their bytes are not in the model's description.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "penstock/plan.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

struct Timeline {
  struct Rank {
    double busy = 0;                      // seconds of computing
    double idle = 0;                      // from the begin to the end of all passes
    double most_held = 0;                 // micro-batches of all its units, between F and B
    std::map<std::string, int64_t> sent;  // link -> bytes in a step
  };
  std::vector<Rank> ranks;  // of the pipeline
  double passes = 0;        // when the last forward or backward has ended
  double step = 0;          // when the last update has
  double bubble() const;    // idle time of all ranks over their busy time
};

// `plans` as of plan_pipeline(), of `tokens` a micro-batch and data rank. Throws ConfigError where
// one waits for what never comes.
Timeline replay(const std::vector<Plan>& plans, const Table& table, const ModelDesc& model,
                const Mesh& mesh, const Machine& machine, double tokens);

}  // namespace penstock
