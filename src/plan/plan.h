#pragma once
// Step and Plan: the ordered actions of one training step. Both can be printed, parsed and hashed.
//
//   micro 0
//   move u1 param all_gather(data)
//   forward u1
//   drop u1 param
//   forward u0 end
//   move u3+u2 grad reduce_scatter(data)
//   norm
//   update u1
//   publish u1 param cast(bf16); all_gather(data)
//
// In a pipeline micro-batches overlap, so lines carry their micro-batch:
//
//   recv u1 act pipeline(-1) #2
//   forward u1 #2
//   send u1 act pipeline(+1) #2
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/place/placement.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock {

enum class Op : uint8_t {
  kMicro,     // a micro-batch begins (number in `micro`)
  kMove,      // moves a role of units through `moves`
  kForward,   // computes, with a mark
  kBackward,  // computes, with a mark; leaves the unit's gradient as a partial sum
  kDrop,      // frees all copies of the role except the resting one
  kSum,       // sums the ranks' addends of a gradient along a model axis
  kNorm,      // computes the global gradient norm over all units: one small collective
  kUpdate,    // runs the optimizer
  kPublish,   // writes the parameter's resting copy from the updated masters, through `moves`
  kSend,      // sends the result of a forward (act) or backward (grad) to the stage at `hop`
  kReceive,   // receives the input of a forward (act) or backward (grad) from the stage at `hop`
};

inline constexpr int kNoMicro = -1;

std::string mark_text(Mark mark);  // " begin"; empty for whole

struct Step {
  Op op = Op::kMove;
  std::vector<int> units{};  // one unit; several if fuse() joined moves
  Role role = Role::kParam;
  Mark mark = Mark::kWhole;
  std::vector<Move> moves{};
  int micro = kNoMicro;
  int hop = 0;    // send, receive: +1 or -1 along the pipeline axis, which is a ring
  Chunk chunk{};  // in updates; printed if there are several chunks: "update u1[0/4]"

  std::string text() const;
  bool is_compute() const { return op == Op::kForward || op == Op::kBackward; }
  bool operator==(const Step&) const = default;
};
Step parse_step(std::string_view line);  // throws ConfigError with the line

struct Plan {
  std::vector<Step> steps;

  std::string text() const;  // one step per line
  uint64_t hash() const;     // of the text
  bool operator==(const Plan&) const = default;
};
Plan parse_plan(std::string_view text);  // blank lines and lines starting with '#' are skipped

}  // namespace penstock
