#pragma once
// Copies: the book that records which copies of a unit's role exist and which one is the authority.
// The planner, the simulator, the tests' interpreter and the executor (for parameters and
// gradients) all use this class. A plain value.
//
// [Note: Copies] Parameters rest: one copy is the authority and stays in its place. In addition
// there is at most one working copy. A return to rest only drops the working copy, so it costs
// nothing. Gradients and optimizer state do not rest: a move removes the copy at its source. If a
// copy already exists at the destination, the arriving values are added to it. After a write, the
// written copy is the only one.
#include <optional>
#include <vector>

#include "src/place/placement.h"

namespace penstock {

// Returns the placement after all moves, or nothing if one of them cannot start.
std::optional<Placement> apply_all(Placement place, const std::vector<Move>& moves);

class Copies {
 public:
  static Copies resting(const Placement& authority);
  static Copies moving(std::vector<Placement> places = {});

  const std::vector<Placement>& places() const { return places_; }  // the newest first
  bool empty() const { return places_.empty(); }
  bool has(const Placement& place) const;
  // Returns the copy in use: the working copy if there is one, else the authority.
  const Placement& current() const { return places_.front(); }
  bool at_rest() const { return places_.size() == 1; }

  // Returns the copy from which a list of moves starts: the newest copy to which all the moves
  // apply.
  std::optional<Placement> source(const std::vector<Move>& moves) const;
  // Returns the shortest list of moves that ends at `wanted`; empty if a copy is already there. If
  // the moves from the current copy need neither a peer nor the disk, the list starts from the
  // current copy. Only moves from the authority have the given wires, so that values are rounded
  // once. Throws ConfigError if there is no such list.
  std::vector<Move> way_to(const Placement& wanted, const Wires& wires = {}) const;

  // Records that the moves ran, from source(moves) or from the given copy. Throws Bug if there is
  // no such copy.
  void move(const std::vector<Move>& moves);
  void move(const std::vector<Move>& moves, const Placement& from);
  void make(const Placement& place);   // a computation made or added to this copy
  void write(const Placement& place);  // this copy changed; all other copies are invalid
  void drop();                         // removes all copies except the authority
  void clear() { places_.clear(); }

  bool operator==(const Copies&) const = default;

 private:
  std::vector<Placement> places_;
  bool rests_ = false;
};

}  // namespace penstock
