#pragma once
// Params: the parameters' copies, and the windows into those that compute.
//
// Compute thread only. Moves to where parameters are computed with are made by the gather lane; the
// others start from there and are made at once, since their memory is wanted back.
#include <string>
#include <vector>

#include "src/exec/rank.h"

namespace penstock::exec {

class Params {
 public:
  Params(Rank& rank, Lanes& lanes) : rank_(rank), lanes_(lanes) {}

  void run(const PlannedStep& planned);  // a move
  // The way from where the unit's parameters are to where `phase` wants them, off plan.
  void move_to(int unit, Phase phase);
  // The unit's full parameters are there: brings them if no move did, waits and sets the windows.
  void require(int unit);
  void drop(int unit);         // back to rest: free
  bool whole(int unit) const;  // gathered, or on its way
  // Whether moves lead away from where parameters are computed with.
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
