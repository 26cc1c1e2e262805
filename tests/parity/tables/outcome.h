#pragma once
// What became of a draw: exact against plain torch, refused by initialize, or broken.
#include <string>
#include <vector>

#include "tests/parity/tables/draw.h"

namespace penstock::tables {

struct Trace;  // training.h

enum class Kind { kExact, kRefused, kBroken };
const char* kind_name(Kind kind);

struct Outcome {
  Kind kind = Kind::kBroken;
  std::string why;  // the refusal, or what is wrong
};

// Trains on ranks that are threads of this process, and compares. May crash with it.
Outcome run(const Draw& draw);
// In what the traces of all ranks differ from plain torch beyond the limits; "" when exact.
std::string what_is_off(const Draw& draw, std::vector<Trace> traces);

// What a refusal says it follows from: of `[plan::check] table.grad.hold is "...": no way back:
// ...`, "no way back". Empty when it has another form.
std::string principle_of(const std::string& refusal);
// Whether the section "What is refused" of a document has an entry (a list item or a line of a
// table) that begins with this name.
bool is_documented(const std::string& principle, const std::string& document);
// What the summary counts together: no numbers, no names, no quoted values.
std::string group_of(const Outcome& outcome);

}  // namespace penstock::tables
