#pragma once
// Plan passes: pure functions Plan -> Plan that never change results. The only exception is
// sum_as_fp32(): after it, a device's back end chooses the order of additions.
#include <cstdint>

#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// Starts parameter moves earlier: each move goes up past compute steps, as long as the bytes that
// are gathered before their use stay within `budget_bytes`. The order of moves is kept. A move
// never goes past a step of its own unit, a micro line or an update.
Plan prefetch(const Plan& plan, const ModelDesc& model, int64_t budget_bytes);

// Joins neighbouring moves of the same kind into one collective, as long as their parameters
// together are smaller than `bucket_bytes`. Gathers join the earlier move; gradients and publishes
// join the later one.
Plan fuse(const Plan& plan, const ModelDesc& model, int64_t bucket_bytes);

// Converts low-precision gradients to fp32 before their first sum, because a ring adds in the dtype
// that it sends. The ring then sends twice the bytes per value, but each value leaves a node only
// once. Sums are computed in fp32 even without this pass. `table` must be normalized for the
// mesh.
Plan sum_as_fp32(const Plan& plan, const Table& table);
// Returns whether a ring in fp32 sends fewer bytes between nodes than a direct exchange of parts
// with 2 bytes per value. Returns false if only a second sum crosses nodes: that sum is in fp32
// anyway.
bool ring_sends_less(const Mesh& mesh, const Table& table);

// Starts reads of state from disk earlier: each read starts before the preceding update line, so
// that both overlap, and the first two reads of optimizer state start before the norm. Inputs of a
// recomputed unit are moved back while the preceding backward line runs.
Plan read_ahead(const Plan& plan);

}  // namespace penstock
