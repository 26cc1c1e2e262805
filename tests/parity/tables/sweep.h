#pragma once
// Runs many draws, each in its own process, and summarizes the outcomes.
#include <map>
#include <string>
#include <vector>

#include "tests/parity/tables/draw.h"
#include "tests/parity/tables/outcome.h"

namespace penstock::tables {

// Runs all draws, `jobs` at a time. Returns their outcomes, in order. The process must have no
// other threads.
std::vector<Outcome> sweep(const std::vector<Draw>& draws, int jobs);

// Returns the line that a child prints for its parent process.
std::string report_line(const Outcome& outcome);

struct Summary {
  std::map<Kind, int> count;
  std::map<Kind, std::map<std::string, int>> groups;  // by group_of()
  double exact_share() const;
  std::string text() const;  // a table
};
Summary summarize(const std::vector<Outcome>& outcomes);

}  // namespace penstock::tables
