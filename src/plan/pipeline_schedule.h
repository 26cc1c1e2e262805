#pragma once
// Schedule: in which order the ranks of a pipeline compute which stage for which micro-batch. It
// prints and parses as torch.distributed.pipelining's CSV of compute actions: a line a rank, such
// as "0F0,0F1,0B0,0B1" (stage, forward or backward, micro-batch).
//
// Stages are numbered through the model. Where a rank has several ("virtual" stages), stage s is on
// rank s modulo the ranks.
#include <compare>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

struct Action {
  int stage = 0;
  bool forward = true;
  int micro = 0;

  std::string text() const;
  auto operator<=>(const Action&) const = default;
};

struct Schedule {
  std::vector<std::vector<Action>> ranks;

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  int num_stages() const;
  int num_micro() const;
  std::string text() const;
  bool operator==(const Schedule&) const = default;
};

// The forward or backward that `action` waits for: of the stage before or after it, or, in the last
// stage, its own forward; an action with stage -1 where it waits for none.
Action before(const Action& action, int num_stages);

struct PipelineShape {
  int ranks = 1;
  int virtual_stages = 1;  // of each rank
  int micro = 1;
};

// "gpipe": all forwards, then all backwards (with virtual stages breadth first, arXiv:2211.05953).
// "1f1b": a backward as soon as there is one (PipeDream-flush, arXiv:2006.09503); one stage a rank.
// "interleaved": 1f1b over virtual stages (arXiv:2104.04473, section 2.2).
// Throws ConfigError: an unknown name, and shapes that the schedule does not have.
Schedule make_schedule(const std::string& name, const PipelineShape& shape);
const std::vector<std::string>& schedule_names();

// Cells that are empty are skipped. Throws ConfigError: what is no forward or full backward, and
// what check_schedule() refuses.
Schedule parse_schedule(std::string_view csv);

// Throws ConfigError unless every stage is on its rank and computes every micro-batch once in each
// direction, in an order that ends.
void check_schedule(const Schedule& schedule);

// What a schedule costs where every stage takes as long.
struct Replay {
  double makespan = 0;
  std::vector<double> idle;    // of each rank, from the begin to the makespan
  std::vector<int> most_held;  // of each rank: stages times micro-batches between F and B
};
Replay replay(const Schedule& schedule, double forward, double backward, double transfer = 0);

}  // namespace penstock
