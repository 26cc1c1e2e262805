#pragma once
// Copies: the book of where a unit's role has copies, and which of them counts. Planner, simulator,
// the tests' interpreter and the executor (of parameters and gradients) keep the same book. A pure
// value.
//
// [Note: Copies] Parameters rest: one copy is the authority and stays where it is, beside it there
// is at most one working copy, and going back to rest is dropping that one: free. Gradients and
// optimizer state move: a copy leaves the place that it is moved from, and one that arrives where
// there is a copy already is added to it. A write makes the copy that was written the only one.
#include <optional>
#include <vector>

#include "src/place/placement.h"

namespace penstock {

// The placement after all the moves, or nothing where one of them cannot start.
std::optional<Placement> apply_all(Placement place, const std::vector<Move>& moves);

class Copies {
 public:
  static Copies resting(const Placement& authority);
  static Copies moving(std::vector<Placement> places = {});

  const std::vector<Placement>& places() const { return places_; }  // the last made first
  bool empty() const { return places_.empty(); }
  bool has(const Placement& place) const;
  // Where the copy is that is used now: the working copy, or else the authority.
  const Placement& current() const { return places_.front(); }
  bool at_rest() const { return places_.size() == 1; }

  // The copy that a list of moves starts from: the last made of those from which all of them apply.
  std::optional<Placement> source(const std::vector<Move>& moves) const;
  // The shortest list of moves that ends at `wanted`, from the current copy where that takes no
  // peer and no disk; empty when a copy is there. Throws ConfigError when there is none.
  std::vector<Move> way_to(const Placement& wanted) const;

  // The book after the moves, from source(moves) or from the copy that is named. Throws Bug when
  // there is none.
  void move(const std::vector<Move>& moves);
  void move(const std::vector<Move>& moves, const Placement& from);
  void make(const Placement& place);   // a computation left a copy there, or added to it
  void write(const Placement& place);  // that copy was changed: the others go
  void drop();                         // all but the authority go
  void clear() { places_.clear(); }

  bool operator==(const Copies&) const = default;

 private:
  std::vector<Placement> places_;
  bool rests_ = false;
};

}  // namespace penstock
