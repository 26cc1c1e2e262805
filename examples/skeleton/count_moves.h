#pragma once
// count_moves: the number of moves of each kind in a plan. Pure, usable from any thread.
//
// Binding: one line in python/src/plan.cpp (each public header has one such file):
//   m.def("count_moves", [](const std::string& plan) { return count_moves(parse_plan(plan)); });
// Documentation: one line in docs/formats.md:
//   `count_moves(plan)`: moves by kind; a fused move counts once, as it is one collective.
#include <cstdint>
#include <map>
#include <string>

#include "src/plan/plan.h"

namespace penstock {

// Move kind ("all_gather") -> number of moves. Kinds that do not occur are absent.
std::map<std::string, int64_t> count_moves(const Plan& plan);

}  // namespace penstock
