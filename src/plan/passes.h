#pragma once
// Passes: pure functions Plan -> Plan that never change results.
#include <cstdint>

#include "src/plan/plan.h"

namespace penstock {

// Starts parameter moves earlier: each goes up over compute steps while the bytes gathered ahead of
// their use stay within `budget_bytes`. Order among moves is kept; a move never passes a step of
// its own unit, a micro line or an update.
Plan prefetch(const Plan& plan, const ModelDesc& model, int64_t budget_bytes);

// Neighbouring moves of the same kind share one collective while their parameters together are
// smaller than `bucket_bytes`: gathers join the earlier one, gradients and publishes the later one.
Plan fuse(const Plan& plan, const ModelDesc& model, int64_t bucket_bytes);

// What an update needs is read from disk while the one before runs: each read starts before that
// update, and the first two reads of optimizer state even before the norm. What a unit's backward
// is recomputed from comes back while the backward before it runs.
Plan read_ahead(const Plan& plan);

}  // namespace penstock
