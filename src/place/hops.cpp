// hops(), applies() and apply() of placement.h: the moves between placements.
#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/place/placement.h"

namespace penstock {

namespace {

bool among(const std::vector<Axis>& axes, Axis axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

// The layout that a kind of move needs on its axes, and the layout that results.
struct Change {
  MoveKind kind;
  Layout from, to;
};
constexpr std::array<Change, 4> kChanges = {{
    {MoveKind::kAllGather, Layout::kSharded, Layout::kReplicated},
    {MoveKind::kReduceScatter, Layout::kPartial, Layout::kSharded},
    {MoveKind::kAllReduce, Layout::kPartial, Layout::kReplicated},
    {MoveKind::kSlice, Layout::kReplicated, Layout::kSharded},
}};

const Change* change_of(MoveKind kind) {
  for (const Change& change : kChanges)
    if (change.kind == kind) return &change;
  return nullptr;
}

bool cuts(const Change& change) {
  return change.from == Layout::kSharded || change.to == Layout::kSharded;
}

// Appends a move or, if the last move has the same kind and wire, adds the axis to that move.
void push(std::vector<Move>& moves, MoveKind kind, Axis axis, const Wire& wire) {
  if (!moves.empty() && moves.back().kind == kind && moves.back().wire == wire) {
    auto& axes = moves.back().axes;
    axes.push_back(axis);
    std::sort(axes.begin(), axes.end());
  } else {
    moves.push_back({.kind = kind, .axes = {axis}, .wire = wire});
  }
}

// Returns the axes that stay sharded inside an axis that changes. They must be gathered first and
// sliced again afterwards, because otherwise shards would not be contiguous.
std::vector<Axis> reopened_axes(const Placement& from, const Placement& to) {
  std::vector<Axis> reopened;
  bool outer_changes = false;
  for (const Axis axis : kShardOrder) {
    const bool was = from.on(axis) == Layout::kSharded;
    const bool is = to.on(axis) == Layout::kSharded;
    if (outer_changes && was && is) reopened.push_back(axis);
    outer_changes = outer_changes || was != is;
  }
  return reopened;
}

// Gathers run from the inner axis outwards and cuts from the outer axis inwards, so shards stay
// contiguous. The remaining sums run last, when the data is smallest.
std::vector<Move> layout_moves(const Placement& from, const Placement& to, const Wires& wires) {
  const std::vector<Axis> reopened = reopened_axes(from, to);
  std::vector<Move> moves;
  const auto add = [&](Axis axis, MoveKind kind) {
    const Change& change = *change_of(kind);
    const bool wanted = from.on(axis) == change.from && to.on(axis) == change.to;
    const bool reopens = kind == MoveKind::kAllGather || kind == MoveKind::kSlice;
    if (!wanted && !(reopens && among(reopened, axis))) return;
    push(moves, kind, axis, kind == MoveKind::kSlice ? Wire() : wires.on(axis));
  };
  for (auto axis = kShardOrder.rbegin(); axis != kShardOrder.rend(); ++axis) {
    add(*axis, MoveKind::kAllGather);
  }
  for (const Axis axis : kShardOrder)
    for (const MoveKind kind : {MoveKind::kReduceScatter, MoveKind::kSlice}) add(axis, kind);
  for (const Axis axis : kShardOrder) add(axis, MoveKind::kAllReduce);
  return moves;
}

// Appends the copies from `from` to `to`, each between neighbouring tiers.
void climb(std::vector<Move>& moves, Tier from, Tier to) {
  int at = static_cast<int>(from);
  const int end = static_cast<int>(to);
  while (at != end) {
    const int next = at + (end > at ? 1 : -1);
    moves.push_back(
        {.kind = MoveKind::kCopy, .from = static_cast<Tier>(at), .to = static_cast<Tier>(next)});
    at = next;
  }
}

// When a cast runs: before the copies to the tier of the collectives, between these copies and the
// collectives, or after everything else.
enum class CastTurn : uint8_t { kNever, kFirst, kBetween, kLast };

// Collectives need the device tier. Casting to a narrower dtype before them, or to a wider dtype
// after them, saves bytes. Collectives cannot read quantized values, so these are decoded before
// them, but after the copies.
CastTurn turn_of_cast(Dtype from, Dtype to, bool changes_layout) {
  if (from == to) return CastTurn::kNever;
  if (is_quantized(from)) return changes_layout ? CastTurn::kBetween : CastTurn::kLast;
  if (is_quantized(to)) return changes_layout ? CastTurn::kLast : CastTurn::kFirst;
  return dtype_bytes(to) > dtype_bytes(from) ? CastTurn::kLast : CastTurn::kFirst;
}

}  // namespace

bool applies(const Placement& place, const Move& move) {
  if (move.kind == MoveKind::kCast) return true;
  if (move.kind == MoveKind::kCopy) return place.tier == move.from;
  if (move.axes.empty() || (move.is_collective() && place.tier != Tier::kDevice)) return false;
  const Change* const change = change_of(move.kind);
  if (change == nullptr) return false;  // layers alone make this move
  for (const Axis axis : move.axes)
    if (place.on(axis) != change->from) return false;
  // While an inner axis is sharded, no outer axis may be gathered or cut: the shards would not stay
  // contiguous.
  int outermost = static_cast<int>(kNumAxes);
  for (const Axis axis : move.axes) outermost = std::min(outermost, nesting(axis));
  return !cuts(*change) || std::all_of(kShardOrder.begin(), kShardOrder.end(), [&](Axis axis) {
    return nesting(axis) < outermost || among(move.axes, axis) ||
           place.on(axis) != Layout::kSharded;
  });
}

Placement apply(const Placement& place, const Move& move) {
  if (!applies(place, move))
    throw ConfigError(concat("[place::apply] ", move.text(), " cannot start from ", place.text()));
  Placement after = place;
  if (move.kind == MoveKind::kCast) {
    after.dtype = move.dtype;
  } else if (move.kind == MoveKind::kCopy) {
    after.tier = move.to;
  } else {
    for (const Axis axis : move.axes) after.on(axis) = change_of(move.kind)->to;
  }
  return after;
}

std::vector<Move> hops(const Placement& from, const Placement& to, const Wires& wires) {
  for (const AxisRow& row : kAxes)
    if (to.on(row.axis) == Layout::kPartial && from.on(row.axis) != Layout::kPartial)
      throw ConfigError(concat("[place::hops] no move takes ", from.text(), " to ", to.text(),
                               ": a copy that is whole or sharded over ", row.name,
                               " cannot become a partial sum"));
  const std::vector<Move> relayout = layout_moves(from, to, wires);
  const CastTurn turn = turn_of_cast(from.dtype, to.dtype, !relayout.empty());
  const Move cast{.kind = MoveKind::kCast, .dtype = to.dtype};
  std::vector<Move> moves;
  if (turn == CastTurn::kFirst) moves.push_back(cast);
  const bool needs_device = std::any_of(relayout.begin(), relayout.end(),
                                        [](const Move& move) { return move.is_collective(); });
  const Tier tier = needs_device ? Tier::kDevice : from.tier;
  climb(moves, from.tier, tier);
  if (turn == CastTurn::kBetween) moves.push_back(cast);
  moves.insert(moves.end(), relayout.begin(), relayout.end());
  climb(moves, tier, to.tier);
  if (turn == CastTurn::kLast) moves.push_back(cast);
  return moves;
}

}  // namespace penstock
