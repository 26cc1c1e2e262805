#pragma once
// The outcome of a draw: equal to plain torch, refused by initialize, or broken.
#include <string>
#include <vector>

#include "tests/parity/tables/draw.h"

namespace penstock::tables {

struct Trace;  // training.h

enum class Kind { kExact, kRefused, kBroken };
const char* kind_name(Kind kind);

struct Outcome {
  Kind kind = Kind::kBroken;
  std::string why;  // the text of the refusal, or what is wrong
};

// Trains on ranks that are threads of this process, and compares the results with plain torch. May
// crash the process.
Outcome run(const Draw& draw);
// Returns how the ranks' traces differ from plain torch by more than the limits; "" if they do not.
std::string what_is_off(const Draw& draw, std::vector<Trace> traces);

// Returns the principle that a refusal names: "no way back" for the text `[plan::check]
// table.grad.hold is "...": no way back: ...`. Returns "" if the text has another form.
std::string principle_of(const std::string& refusal);
// Returns whether the section "What is refused" of the document has an entry (a list item or a line
// of a table) that begins with this principle.
bool is_documented(const std::string& principle, const std::string& document);
// Returns the text under which the summary counts an outcome: `why` without numbers, names and
// quoted values.
std::string group_of(const Outcome& outcome);

}  // namespace penstock::tables
