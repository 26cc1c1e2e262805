#include "src/plan/copies.h"

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

// Returns whether the move needs peers or the disk.
bool is_fetched(const Move& move) {
  return move.is_collective() || (move.kind == MoveKind::kCopy && move.from == Tier::kDisk);
}

}  // namespace

std::optional<Placement> apply_all(Placement place, const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    if (!applies(place, move)) return std::nullopt;
    place = apply(place, move);
  }
  return place;
}

Copies Copies::resting(const Placement& authority) {
  Copies copies;
  copies.places_ = {authority};
  copies.rests_ = true;
  return copies;
}

Copies Copies::moving(std::vector<Placement> places) {
  Copies copies;
  copies.places_ = std::move(places);
  return copies;
}

bool Copies::has(const Placement& place) const {
  return std::find(places_.begin(), places_.end(), place) != places_.end();
}

std::optional<Placement> Copies::source(const std::vector<Move>& moves) const {
  for (const Placement& place : places_) {
    if (apply_all(place, moves)) return place;
  }
  return std::nullopt;
}

std::vector<Move> Copies::way_to(const Placement& wanted, const Wires& wires) const {
  PENSTOCK_ASSERT(!empty(), concat("there is no copy to move to ", wanted.text()));
  if (has(wanted)) return {};
  std::vector<Move> best;
  for (const Placement& place : places_) {
    std::vector<Move> moves = hops(place, wanted, place == places_.back() ? wires : Wires());
    // A plan line names no source copy, so source() must find this copy again when the line runs.
    if (source(moves) != place) continue;
    if (best.empty() || moves.size() < best.size()) best = std::move(moves);
    const bool at_hand = place == current() && std::none_of(best.begin(), best.end(), is_fetched);
    if (at_hand) break;
  }
  return best;
}

void Copies::move(const std::vector<Move>& moves) {
  const std::optional<Placement> from = source(moves);
  PENSTOCK_ASSERT(from, concat("no copy for ", moves.front().text(), " to start from"));
  move(moves, *from);
}

void Copies::move(const std::vector<Move>& moves, const Placement& from) {
  const std::optional<Placement> reached = apply_all(from, moves);
  PENSTOCK_ASSERT(reached && has(from), concat("no copy at ", from.text(), " to move"));
  const Placement to = *reached;
  // [Note: Copies] If the role rests, the move replaces the working copy. If the role moves, its
  // copy at the source is removed.
  if (rests_) {
    drop();
    if (to != places_.back()) places_.insert(places_.begin(), to);
    return;
  }
  std::erase(places_, Placement(from));
  make(to);
}

void Copies::make(const Placement& place) {
  if (!has(place)) places_.insert(places_.begin(), place);
}

void Copies::write(const Placement& place) { places_ = {place}; }

void Copies::drop() {
  PENSTOCK_ASSERT(rests_, "gradients and optimizer state have no copy to return to");
  places_.erase(places_.begin(), places_.end() - 1);
}

}  // namespace penstock
