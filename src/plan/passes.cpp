#include "src/plan/passes.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/place/placement.h"
#include "src/plan/copies.h"
#include "src/plan/step_queries.h"

namespace penstock {

namespace {

bool is_collective(const Step& step) {
  return std::any_of(step.moves.begin(), step.moves.end(),
                     [](const Move& move) { return move.is_collective(); });
}

// Returns whether the step may share a collective.
bool is_fusible(const Step& step) {
  return is_collective(step) &&
         (is_move(step, Role::kParam) || is_move(step, Role::kGrad) || step.op == Op::kPublish);
}

// Returns whether the move reads state for an update from disk.
bool is_read(const Step& step) {
  return (is_move(step, Role::kOptim) || is_move(step, Role::kGrad)) &&
         step.moves.front().kind == MoveKind::kCopy && step.moves.front().from == Tier::kDisk;
}

bool sums(const Move& move) {
  return move.kind == MoveKind::kReduceScatter || move.kind == MoveKind::kAllReduce;
}

bool can_join(const Step& first, const Step& second, const ModelDesc& model, int64_t bucket) {
  return first.moves == second.moves && !shares_unit(first, second) &&
         param_bytes(first, model) + param_bytes(second, model) < bucket;
}

void join_units(Step& into, const Step& first, const Step& second) {
  std::vector<int> units = first.units;
  units.insert(units.end(), second.units.begin(), second.units.end());
  into.units = std::move(units);
}

// Gathers join the earlier collective, so that no gather is late. Reductions and publishes join the
// later collective, because their data must exist first.
bool goes_up(const Step& step) { return is_move(step, Role::kParam); }

// Returns whether the earlier collective can move down past this step.
bool lets_pass(const Step& between, const Step& step) {
  if (!shares_unit(between, step)) return true;
  return step.op != Op::kPublish && !between.is_compute() && !is_move(between, Role::kGrad) &&
         between.op != Op::kSum;
}

// Returns the index of a collective that the collective at `later` can join, or steps.size().
size_t partner(const std::vector<Step>& steps, size_t later) {
  const Step& own = steps[later];
  for (size_t i = later; i > 0; --i) {
    const Step& step = steps[i - 1];
    const bool alike = is_fusible(step) && step.op == own.op && step.role == own.role;
    const bool own_update = own.op == Op::kPublish && step.op == Op::kUpdate;
    if (is_wall(step) && !alike && !own_update) break;
    if (goes_up(own) && in_order(step, own)) break;
    if (!alike) continue;
    const auto end = steps.begin() + static_cast<std::ptrdiff_t>(later);
    const bool blocked = !goes_up(own) && std::any_of(end - static_cast<std::ptrdiff_t>(later - i),
                                                      end, [&](const Step& between) {
                                                        return !lets_pass(between, step);
                                                      });
    return blocked ? steps.size() : i - 1;
  }
  return steps.size();
}

using Position = std::vector<Step>::iterator;

Position before_the_update_above(std::vector<Step>& steps, const Step& read) {
  auto at = steps.end();
  while (at != steps.begin()) {
    const Step& above = *(at - 1);
    // The last gradients are still being written to disk until the norm.
    if (above.op == Op::kNorm && read.role == Role::kGrad) break;
    if (above.op != Op::kUpdate && above.op != Op::kPublish && above.op != Op::kNorm &&
        !is_move(above, Role::kOptim) && !is_read(above)) {
      break;
    }
    --at;
    if (above.op == Op::kUpdate) break;
  }
  if (read.role == Role::kGrad) return at;
  // Nothing is written before the first update. So the first two reads may start before the norm.
  auto norm = at;
  while (norm != steps.begin() && is_read(*(norm - 1))) --norm;
  return norm != steps.begin() && (norm - 1)->op == Op::kNorm ? norm - 1 : at;
}

// Returns whether the move brings saved inputs to a backward, or cached tokens to a forward.
bool brings_inputs(const Step& step) {
  return (is_move(step, Role::kAct) || is_move(step, Role::kCache)) &&
         step.moves.front().kind == MoveKind::kCopy && step.moves.front().from != Tier::kDevice;
}

// A move that brings inputs starts before the preceding unit computes.
Position before_the_unit_above(std::vector<Step>& steps, const Step& move) {
  const Op pass = move.role == Role::kAct ? Op::kBackward : Op::kForward;
  auto at = steps.end();
  while (at != steps.begin()) {
    const Step& above = *(at - 1);
    const bool same = is_move(above, move.role) && shares_unit(above, move);
    if (is_wall(above) || (above.is_compute() && above.op != pass) || same) break;
    --at;
    if (above.op == pass) break;
  }
  return at;
}

}  // namespace

Plan fuse(const Plan& plan, const ModelDesc& model, int64_t bucket_bytes) {
  Plan fused;
  std::vector<Step>& steps = fused.steps;
  for (const Step& step : plan.steps) {
    steps.push_back(step);
    if (!is_fusible(step)) continue;
    const bool earlier_waits = !goes_up(step);
    const size_t later = steps.size() - 1;
    const size_t earlier = partner(steps, later);
    if (earlier == steps.size() || !can_join(steps[earlier], step, model, bucket_bytes)) continue;
    join_units(steps[earlier_waits ? later : earlier], steps[earlier], step);
    steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(earlier_waits ? earlier : later));
  }
  return fused;
}

Plan read_ahead(const Plan& plan) {
  Plan ahead;
  std::vector<Step>& steps = ahead.steps;
  for (const Step& step : plan.steps) {
    auto at = steps.end();
    if (is_read(step)) {
      at = before_the_update_above(steps, step);
    } else if (brings_inputs(step)) {
      at = before_the_unit_above(steps, step);
    }
    steps.insert(at, step);
  }
  return ahead;
}

bool ring_sends_less(const Mesh& mesh, const Table& table) {
  const Placement& made = table.grad_after_backward();
  const Placement& kept = table.at(Role::kGrad, Phase::kUpdate);
  const std::vector<Move> moves = hops(made, kept);
  const auto first = std::find_if(moves.begin(), moves.end(), sums);
  if (first == moves.end() || made.dtype == Dtype::kFp32) return false;
  if (std::find(first->axes.begin(), first->axes.end(), Axis::kNode) == first->axes.end())
    return false;
  const int64_t local = mesh.size(Axis::kLocal), ranks = mesh.data();
  // Compares the bytes that leave a node: the number of gradient parts times the bytes per value.
  return 4 * (ranks - 1) < 2 * local * (ranks - local);
}

Plan sum_as_fp32(const Plan& plan, const Table& table) {
  Plan wide = plan;
  for (Step& step : wide.steps) {
    if (!is_move(step, Role::kGrad)) continue;
    const auto sum = std::find_if(step.moves.begin(), step.moves.end(), sums);
    if (sum == step.moves.end() || sum->wire.lossy()) continue;
    // Gradients that are partial in `hold` are summed from that placement.
    Placement from = table.at(Role::kGrad, Phase::kHold);
    std::optional<Placement> to = apply_all(from, step.moves);
    if (!to) to = apply_all(from = table.grad_after_backward(), step.moves);
    PENSTOCK_ASSERT(to, concat("no gradient for ", step.moves.front().text(), " to start from"));
    if (from.dtype == Dtype::kFp32) continue;
    std::vector<Move> moves;
    for (auto move = step.moves.begin(); move != step.moves.end(); ++move) {
      if (move == sum) moves.push_back({MoveKind::kCast, {}, {}, {}, Dtype::kFp32});
      if (move->kind != MoveKind::kCast) moves.push_back(*move);
    }
    if (to->dtype != Dtype::kFp32) moves.push_back({MoveKind::kCast, {}, {}, {}, to->dtype});
    step.moves = std::move(moves);
  }
  return wide;
}

}  // namespace penstock
