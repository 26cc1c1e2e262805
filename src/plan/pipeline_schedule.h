#pragma once
// Schedule: the order in which the ranks of a pipeline compute stages and micro-batches. Its text
// form is the CSV of compute actions of torch.distributed.pipelining: one line per rank, such as
// "0F0,0F1,0B0,0B1" (stage, forward or backward, micro-batch).
//
// [Note: Zero bubble] A backward may be two actions: "0I0" computes the gradients of the stage's
// inputs, for which the previous stage waits, and "0W0" those of the weights, for which no stage
// waits. So W fills the time in which a rank would wait (arXiv:2401.10241).
//
// Stages are numbered in model order. If a rank has several ("virtual") stages, stage s is on rank
// s modulo the number of ranks.
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

// The gradients that a backward computes.
enum class BackwardPart : uint8_t { kAll, kInputs, kWeights };

// One stage computes one micro-batch in one direction.
struct Action {
  int stage = 0;
  bool forward = true;
  int micro = 0;
  BackwardPart part = BackwardPart::kAll;

  // Returns whether the micro-batch's activations in this stage are free afterwards.
  bool is_last() const { return !forward && part != BackwardPart::kInputs; }
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

// Returns the rank that has the stage, in a pipeline of `num_ranks` ranks.
constexpr int rank_of_stage(int stage, int num_ranks) { return stage % num_ranks; }

// Returns the action that `action` waits for: the forward of the previous stage, the backward of
// the next stage, or, for a backward of the last stage, its own forward. Weights wait for the
// stage's inputs. If there is no such action, the returned stage is -1. A backward is returned as
// a whole one, even if the schedule splits it.
Action before(const Action& action, int num_stages);

struct PipelineShape {
  int ranks = 1;
  int virtual_stages = 1;  // per rank
  int micro = 1;
};

// "gpipe": all forwards, then all backwards (with virtual stages: breadth first, arXiv:2211.05953).
// "1f1b": each backward as early as possible (PipeDream-flush, arXiv:2006.09503); one stage per
// rank. "interleaved": 1f1b over virtual stages (arXiv:2104.04473, section 2.2). "zero_bubble":
// 1f1b with split backwards (ZB-H1 of arXiv:2401.10241); one stage per rank, and each rank holds as
// many micro-batches as the first rank of 1f1b. Throws ConfigError for an unknown name and for
// shapes that the schedule does not allow.
Schedule make_schedule(const std::string& name, const PipelineShape& shape);
const std::vector<std::string>& schedule_names();

// Parses the CSV and skips empty cells. Throws ConfigError for a cell that is no action, and for
// schedules that check_schedule() refuses.
Schedule parse_schedule(std::string_view csv);

// Throws ConfigError unless every stage is on its rank and computes every micro-batch once in each
// direction (a backward in one part or in two), in an order that can finish.
void check_schedule(const Schedule& schedule);

// Returns the actions of all ranks in one order that can finish: one action per rank and round,
// each after the actions that it waits for. Ranks that send and receive their messages in this
// order cannot deadlock.
std::vector<Action> in_rounds(const Schedule& schedule);
// Returns the stage that receives the result of `action`, or -1 if there is none.
int next_stage(const Action& action, int num_stages);

// Cost of a schedule if all stages take the same time. Each part of a split backward takes half of
// the backward's time.
struct Replay {
  double makespan = 0;
  std::vector<double> idle;  // by rank: idle time from the start to the makespan
  // By rank: the largest number of (stage, micro-batch) pairs between forward and backward.
  std::vector<int> most_held;
};
Replay replay(const Schedule& schedule, double forward, double backward, double transfer = 0);

}  // namespace penstock
