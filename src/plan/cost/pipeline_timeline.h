#pragma once
// Timeline: when each rank of a pipeline executes each line of its plan. A line begins when its
// inputs are ready and its lane is free. A rank has four lanes (compute, gather, reduce, update),
// and a send lane for each neighbour. All ranks start together, and links are not shared. Computing
// waits for the exchanges of layers. It also loses the time that lanes take from its cores
// (Machine::overlap).
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/plan.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// Work of a unit on one rank for one micro-batch. Kernels run one after another: a pass takes the
// time of its FLOPs plus the time of its device memory traffic. These numbers depend on a model's
// operators, which are not part of the planner's description.
struct UnitWork {
  struct ComputePass {
    double flops = 0, memory_bytes = 0;
  };
  ComputePass forward{}, backward{};  // backward does not include recomputation
};
// Returns the work of each unit, for `tokens` per micro-batch and data rank. Counts only FLOPs per
// parameter and token: 2 in forward; in backward 4 if the parameter trains, 2 if it is frozen.
std::vector<UnitWork> work_of(const ModelDesc& model, double tokens);

struct Timeline {
  struct RankTime {
    double busy = 0;  // seconds of computing, including exchanges of layers
    double idle = 0;  // seconds without computing until the end of all passes
    // Largest number of micro-batches between forward and backward, weighted by unit size.
    double most_held = 0;
    std::map<std::string, int64_t> sent;  // link -> bytes in a step
    std::vector<double> lines;            // seconds that each plan line takes alone
  };
  std::vector<RankTime> ranks;  // by pipeline rank
  double passes = 0;            // end of the last forward or backward
  double step = 0;              // end of the last update
  double bubble() const;        // idle time of all ranks / their busy time
};

// A line of a plan and the seconds that it takes alone.
struct TimedLine {
  Step step;
  double seconds = 0;
  double share = 0;  // computing lines: the unit's fraction of the rank's parameters
  bool operator==(const TimedLine&) const = default;
};

// The plan of one rank with times. Ranks send each other its text form.
struct TimedPlan {
  std::vector<TimedLine> lines;
  std::map<std::string, int64_t> sent{};  // link -> bytes; not in the text
  std::string text() const;
};
TimedPlan parse_timed_plan(std::string_view text);  // throws ConfigError with the line

// Returns `plan` with times, for a rank whose part of the model is `part`. `work` is by unit.
TimedPlan timed(const Plan& plan, const Table& table, const ModelDesc& part, const Mesh& mesh,
                const Machine& machine, const std::vector<UnitWork>& work);

// Replays the plans of a pipeline's ranks. `overlap`: see Machine. Throws ConfigError if a plan
// waits for a message that is never sent.
Timeline replay(const std::vector<TimedPlan>& ranks, double overlap);
// `plans` come from plan_pipeline().
Timeline replay(const std::vector<Plan>& plans, const Table& table, const ModelDesc& model,
                const Mesh& mesh, const Machine& machine, const std::vector<UnitWork>& work);

}  // namespace penstock
