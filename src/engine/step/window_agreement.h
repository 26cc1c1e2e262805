#pragma once
// [Note: One window] Ranks may take different ways through a model, so what one of them saw of a
// window is not what counts. A backward is of the window if it gave a gradient on any rank: one
// that reached frozen weights alone, everywhere, closes nothing. A gradient that came after its
// move is moved by all ranks, also by those where none was late. They tell each other with the
// norm, which costs no exchange of its own, and where somebody looks at gradients before.
#include <string>
#include <vector>

#include "penstock/config.h"
#include "src/engine/step/accumulation_window.h"
#include "src/engine/step/driver.h"

namespace penstock::engine {

// What this rank has to say; as long on every rank.
std::string say_window(const AccumulationWindow& window, const Driver& driver);
// Of what the optimizer was set to: as long on every rank, and the same if that is.
std::string options_text(const std::vector<OptimizerConfig>& groups, const std::string& others);
// What all ranks said, by rank; options_text() may be at its end: backwards that gave nothing
// anywhere leave the window, and late gradients are moved. False when there were any, so that there
// is something else to say. Throws RuntimeFault where ranks ended different numbers of backwards,
// or have other options.
bool hear_window(const std::vector<std::string>& all, AccumulationWindow& window, Driver& driver);
// Takes the digit at the end of what each rank said, which tells `wanted` of its own; `agreed`
// becomes the highest.
void hear_asked(std::vector<std::string>& all, int& wanted, int& agreed);
// A rank each: '1' where it says so, else '0'.
std::string say_each(exec::Executor& executor, const std::string& label, bool mine);
// The first rank's problem, "rank 2: ...", on every rank; empty where none has one.
std::string first_problem(exec::Executor& executor, const std::string& label,
                          const std::string& mine);
// Says and hears until it is the same everywhere.
void agree_on_window(exec::Executor& executor, AccumulationWindow& window, Driver& driver);

}  // namespace penstock::engine
