#pragma once
// Timeline: when all ranks of a pipeline do what, from their plans. A line begins when what it
// needs has ended and its lane is free; a rank has lanes that compute, gather, reduce and update,
// and one to send to either side. Nobody is late, and links do not share. What is computed waits
// for sums of activations over tensor ranks, and for what lanes take of its cores
// (Machine::overlap).
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "penstock/plan.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// What a rank computes in a unit for one micro-batch. Kernels follow one another: a pass takes as
// long as its FLOPs and then its bytes of device memory. The planner does without: these are of
// a model's operators, which its description does not have.
struct UnitWork {
  struct ComputePass {
    double flops = 0, memory_bytes = 0;
  };
  ComputePass forward{}, backward{};  // the latter without what is computed again
  double summed_bytes = 0;            // of activations, in a sum over tensor ranks
};
// By unit, of `tokens` a micro-batch and data rank: a forward is 2 FLOPs a parameter and token, a
// backward 4 where it trains, and nothing else takes time.
std::vector<UnitWork> work_of(const ModelDesc& model, double tokens);

struct Timeline {
  struct RankTime {
    double busy = 0;                      // seconds of computing, sums over tensor ranks included
    double idle = 0;                      // from the begin to the end of all passes
    double most_held = 0;                 // micro-batches of all its units, between F and B
    std::map<std::string, int64_t> sent;  // link -> bytes in a step
    std::vector<double> lines;            // by line of its plan: seconds of its own
  };
  std::vector<RankTime> ranks;  // of the pipeline
  double passes = 0;            // when the last forward or backward has ended
  double step = 0;              // when the last update has
  double bubble() const;        // idle time of all ranks over their busy time
};

// `plans` as of plan_pipeline(), `work` by unit. Throws ConfigError where one waits for what never
// comes.
Timeline replay(const std::vector<Plan>& plans, const Table& table, const ModelDesc& model,
                const Mesh& mesh, const Machine& machine, const std::vector<UnitWork>& work);

}  // namespace penstock
