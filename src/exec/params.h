#pragma once
// Params: the copies of the parameters, and the windows into the copies that compute.
//
// Compute thread only. Moves towards the placement that computes run on the gather lane. Moves away
// from it run at once on the calling thread, so that their memory is free on return.
#include <string>
#include <vector>

#include "src/exec/rank.h"

namespace penstock::exec {

class Params {
 public:
  Params(Rank& rank, Lanes& lanes) : rank_(rank), lanes_(lanes) {}

  void run(const PlannedStep& planned);  // runs a parameter move of the plan
  // Moves the unit's parameters, off plan, from their current placement to that of `phase`.
  void move_to(int unit, Phase phase);
  // Makes the unit's parameters whole: starts the move if none did, waits for it, sets the windows.
  void require(int unit);
  void drop(int unit);         // back to rest: drops the working copy, moves nothing
  bool whole(int unit) const;  // gathered, or the gather is in progress
  // Returns whether the moves lead away from the placement that computes.
  bool leaves(const std::vector<Move>& moves) const;

 private:
  void go(const std::vector<int>& units, const std::vector<Move>& moves, const comm::Label& label);
  void bring(const std::vector<int>& units, const Placement& from, const std::vector<Move>& moves,
             const comm::Label& label);
  void put_away(int unit, const std::vector<Move>& moves, const comm::Label& label);
  void fetch(const std::vector<int>& units, const Placement& from);
  void settle(UnitState& unit);
  void attach(UnitState& unit);
  void detach(UnitState& unit);
  void arrive(UnitState& unit, const std::vector<Move>& moves, std::vector<Copy> copies);

  Rank& rank_;
  Lanes& lanes_;
};

}  // namespace penstock::exec
