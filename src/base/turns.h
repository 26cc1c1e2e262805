#pragma once
// Turns: the calls of this rank that run collectives, in order.
//
// [Note: Turns] All ranks must make the same calls that run collectives. A rank that makes another
// call, or that raises an error, stops making the collectives that the others wait for. So a rank
// that has waited for a second asks the rank that it waits for: the question contains the asking
// rank's last turns and the collective in which it waits. The rank that is asked compares them with
// its own turns and with the collective in which it waits itself. If they contradict each other in
// two questions in a row, it ends the exchanges of all ranks, with the difference as the reason. No
// question is sent while no rank waits that long.
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "src/base/status.h"

namespace penstock {

struct Turn {
  std::string kind;    // what the ranks compare: "forward", "norm ()"
  std::string did;     // for errors: "called step() in step 3"
  std::string raised;  // the error that ended the turn early on this rank, or ""
  bool owes = false;   // because of the error, not all collectives of the turn were made
};

// How the texts of collectives end that gather a unit off plan: the rank runs units in an order
// that no plan has.
inline constexpr const char* kOffPlan = " off plan";

// What a rank says about itself: its last turns, and the collective in which it waits.
struct Standing {
  int rank = 0;
  int64_t begun = 0;       // number of turns so far
  std::deque<Turn> turns;  // the last turns
  std::string lane;        // "" if it does not wait
  int64_t sequence = 0;    // of the collective
  uint32_t tag = 0;        // of the collective
  std::string collective;  // its text

  std::string text() const;
  static Standing parse(const std::string& text);
  const Turn* turn(int64_t number) const;  // null if it is not among the last turns
};

// Usable from any thread.
class TurnLog {
 public:
  void begin(Turn turn);
  // Keeps the first error of the current turn.
  void raised(const std::string& error, bool owes);
  Standing standing(int rank) const;

 private:
  mutable std::mutex mutex_;
  int64_t begun_ = 1;                                                   // guarded by mutex_
  std::deque<Turn> turns_{{"start", "started", std::string(), false}};  // guarded by mutex_
};

// Returns why the rank that asks waits for this rank in vain, or "". `status`: this rank's status.
std::string difference(const Standing& asks, const Standing& own, const RankStatus& status);
// Returns whether an error text came from difference().
bool is_difference(const std::string& text);

}  // namespace penstock
