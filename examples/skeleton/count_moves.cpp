#include "examples/skeleton/count_moves.h"

namespace penstock {

std::map<std::string, int64_t> count_moves(const Plan& plan) {
  std::map<std::string, int64_t> counts;
  for (const Step& step : plan.steps)
    for (const Move& move : step.moves) ++counts[move_kind_name(move.kind)];
  return counts;
}

}  // namespace penstock
