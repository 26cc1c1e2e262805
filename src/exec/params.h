#pragma once
// Params: the copies of the parameters, and the windows into the copies that forward and backward
// use.
//
// Used only by the model's thread. The gather lane runs moves to the placement for computing.
// Moves away from that placement run on the calling thread, so the memory is free when the call
// returns.
#include <string>
#include <vector>

#include "src/exec/rank.h"

namespace penstock::exec {

class Params {
 public:
  Params(Rank& rank, Lanes& lanes) : rank_(rank), lanes_(lanes) {}

  void run(const PlannedStep& planned);  // runs a parameter move of the plan
  // Moves the unit's parameters, off plan, from their current placement to the placement of
  // `phase`.
  void move_to(int unit, Phase phase) { move_to(unit, phase, wires_); }
  // Between steps: sets the wires of moves off the plan.
  void use(const Wires& wires) { wires_ = wires; }
  // Makes the unit's parameters whole: starts the move if it has not started, waits for it, and
  // sets the windows.
  void require(int unit);
  // Like require(), but with exactly the values at rest, even if the table gives parameters a lossy
  // wire.
  void require_exact(int unit);
  // Returns whether the values of the unit's working copy are rounded by a lossy wire.
  bool coded(int unit) const { return !rank_.units[unit].codings.empty(); }
  void drop(int unit);         // returns to rest: frees the working copy and moves nothing
  bool whole(int unit) const;  // whether the unit is gathered or its gather is in progress
  // Returns whether the moves lead away from the placement for computing.
  bool leaves(const std::vector<Move>& moves) const;

 private:
  void move_to(int unit, Phase phase, const Wires& wires);
  void show(int unit);
  void go(const std::vector<int>& units, const std::vector<Move>& moves, const comm::Label& label);
  void bring(const std::vector<int>& units, const Placement& from, const std::vector<Move>& moves,
             const comm::Label& label);
  void put_away(int unit, const std::vector<Move>& moves, const comm::Label& label);
  void fetch(const std::vector<int>& units, const Placement& from, bool straight);
  void return_memory(const std::vector<int>& units, const Placement& from,
                     std::vector<std::vector<Copy>>& arriving);
  void settle(UnitState& unit);
  void attach(UnitState& unit);
  void detach(UnitState& unit);
  void arrive(UnitState& unit, const std::vector<Move>& moves, std::vector<Copy> copies);

  Rank& rank_;
  Lanes& lanes_;
  Wires wires_{};
};

}  // namespace penstock::exec
