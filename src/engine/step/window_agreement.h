#pragma once
// Agreement of all ranks on the accumulation window, and other texts that ranks exchange.
//
// [Note: One window] Ranks may take different branches of a model, so one rank cannot decide alone
// what belongs to a window. A backward counts if it produced a gradient on any rank. A backward
// that reached only frozen weights on all ranks does not count. If on any rank a unit's gradient
// arrived after the gradient's move had run, all ranks run the move again. The ranks exchange these
// facts in the exchange that computes the norm, and before users read or replace gradients.
#include <functional>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "src/engine/step/accumulation_window.h"
#include "src/engine/step/driver.h"

namespace penstock::engine {

// Number of bytes that follow say_window() in the exchange of the norm: options_text(), one digit
// for traces and one for saves.
inline constexpr size_t kSaidBesides = sizeof(uint64_t) + 2;

// Returns this rank's facts about the window as a text. The text has the same length on every rank.
std::string say_window(const AccumulationWindow& window, const Driver& driver);
// Returns a hash of the optimizer's options. Equal options have equal hashes, and the length is the
// same on every rank.
std::string options_text(const std::vector<OptimizerConfig>& groups, const std::string& others);
// Takes the texts of all ranks, by rank. A text may end with options_text(). Removes backwards that
// produced no gradient on any rank, and moves late gradients. If it did either, returns false, and
// the ranks must exchange their texts again. Throws RuntimeFault if ranks ended different numbers
// of backwards or have different options.
bool hear_window(const std::vector<std::string>& all, AccumulationWindow& window, Driver& driver);
// Removes the last digit of each rank's text: the save urgency that the rank wants. Raises `agreed`
// to the highest digit and clears `wanted`.
void hear_asked(std::vector<std::string>& all, int& wanted, int& agreed);
// Returns whether ranks exchange parameters in a forward.
bool forwards_meet(const exec::Executor& executor);
// [all ranks] Returns one character per rank: '1' if `mine` is true on that rank, else '0'.
std::string say_each(exec::Executor& executor, const std::string& label, bool mine);
// [all ranks] Returns the text of each rank, by rank. Texts may differ in length.
std::vector<std::string> share_text(exec::Executor& executor, const std::string& label,
                                    const std::string& mine);
// [all ranks] Returns the problem of the first rank that has one, as "rank 2: ...", or "" if no
// rank has one.
std::string first_problem(exec::Executor& executor, const std::string& label,
                          const std::string& mine);
// [all ranks] Must be called before a forward or backward that runs collectives. If the window
// already had its last backward, other ranks may be in step(), and would wait until a timeout. So
// this call takes part in the exchange of the norm. All ranks then call `drop` and throw a
// RuntimeFault at once. Does nothing in a pipeline, because there the schedule decides what follows
// a backward.
void go_on(exec::Executor& executor, const AccumulationWindow& window, const Driver& driver,
           exec::Norm::Next next, const std::function<void()>& drop);
// Returns "DID in step 3 after 1 of 4 backwards", for take_turn(). `steps`: updates so far.
std::string at_this_point(const char* did, const AccumulationWindow& window, int64_t steps);
// [all ranks] Exchanges the window's facts until hear_window() changes nothing.
void agree_on_window(exec::Executor& executor, AccumulationWindow& window, Driver& driver);

}  // namespace penstock::engine
