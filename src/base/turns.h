#pragma once
// Turns: the calls of this rank that run collectives, in order.
//
// [Note: Turns] Some calls run collectives, and all ranks must make the same such calls. If one
// rank makes a different call or raises an error, the other ranks wait for collectives that the
// first rank never makes. So after a wait of one second, a rank sends a question to the rank that
// it waits for. The question contains the last turns of the rank that asks, and the collective in
// which that rank waits. The rank that receives the question compares it with its own turns and its
// own collective. If two questions in a row show a contradiction, the receiving rank ends the
// exchanges of all ranks, with the difference as the reason. If no wait lasts one second, no
// questions are sent.
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

// Suffix of a collective's text. It marks a gather that is not in the plan, because this rank runs
// its units in an order for which there is no plan.
inline constexpr const char* kOffPlan = " off plan";

// The advice of every error that says that ranks run units in different orders or different numbers
// of times.
inline constexpr const char* kUnequalUnits =
    "To prevent this, run the units in the same order and equally often on every rank, or use "
    "\"zero2\", which keeps parameters whole, or keep the units' modules in the root: leave them "
    "out of \"units.modules\", and set a larger \"units.layer_bytes\"";

// What a rank says about itself: its last turns, and the collective in which it waits.
struct Standing {
  int rank = 0;
  int64_t begun = 0;       // number of turns so far
  std::deque<Turn> turns;  // the last turns
  std::string lane;        // "" if the rank does not wait
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
  // Forgets this error: its caller caught it and goes on with the turn.
  void went_on();
  Standing standing(int rank) const;

 private:
  mutable std::mutex mutex_;
  int64_t begun_ = 1;                                                   // guarded by mutex_
  std::deque<Turn> turns_{{"start", "started", std::string(), false}};  // guarded by mutex_
};

// Returns the reason why the asking rank waits for this rank in vain, or "" if no reason was found.
// `status`: this rank's status.
std::string difference(const Standing& asks, const Standing& own, const RankStatus& status);
// Returns whether an error text came from difference().
bool is_difference(const std::string& text);

}  // namespace penstock
