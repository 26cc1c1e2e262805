#pragma once
// Many draws, each in a process of its own, and what to say of them.
#include <map>
#include <string>
#include <vector>

#include "tests/parity/tables/draw.h"
#include "tests/parity/tables/outcome.h"

namespace penstock::tables {

// Runs all of them, `jobs` at a time; their outcomes in order. The caller must have no other
// thread.
std::vector<Outcome> sweep(const std::vector<Draw>& draws, int jobs);

// What one run prints for its parent process to read.
std::string report_line(const Outcome& outcome);

struct Summary {
  std::map<Kind, int> count;
  std::map<Kind, std::map<std::string, int>> groups;  // by group_of()
  double exact_share() const;
  std::string text() const;  // a table
};
Summary summarize(const std::vector<Outcome>& outcomes);

}  // namespace penstock::tables
