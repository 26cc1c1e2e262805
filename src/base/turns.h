#pragma once
// Turns: the calls of this rank that run collectives, in order.
//
// [Note: Turns] All ranks must make the same calls that run collectives. If one rank makes a
// different call or raises an error, the other ranks wait for collectives that this rank never
// makes. So after a wait of one second, a rank sends a question to the rank that it waits for. The
// question contains the last turns of the rank that asks, and the collective in which that rank
// waits. The rank that receives the question compares it with its own turns and its own collective.
// If two questions in a row show a contradiction, the receiving rank ends the exchanges of all
// ranks, with the difference as the reason. Without waits of one second there are no questions.
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
  bool owes = false;   // because of the error, some collectives of the turn were not made
};

// End of a collective's text if the collective gathers a unit off plan, because this rank runs
// units in an order that no plan has.
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

// Returns the reason why the rank that asks waits for this rank in vain, or "". `status`: this
// rank's status.
std::string difference(const Standing& asks, const Standing& own, const RankStatus& status);
// Returns whether an error text came from difference().
bool is_difference(const std::string& text);

}  // namespace penstock
