#pragma once
// Passes: pure functions Plan -> Plan that never change results (but for the order in which a back
// end of a device adds up, where sum_as_fp32() leaves a sum to it).
#include <cstdint>

#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// Starts parameter moves earlier: each goes up over compute steps while the bytes gathered ahead of
// their use stay within `budget_bytes`. Order among moves is kept; a move never passes a step of
// its own unit, a micro line or an update.
Plan prefetch(const Plan& plan, const ModelDesc& model, int64_t budget_bytes);

// Neighbouring moves of the same kind share one collective while their parameters together are
// smaller than `bucket_bytes`: gathers join the earlier one, gradients and publishes the later one.
Plan fuse(const Plan& plan, const ModelDesc& model, int64_t bucket_bytes);

// Gradients of low precision are fp32 on the wire of their first sum, which is what a ring that
// adds up needs: twice the bytes, but those of a node go to another node once. Sums are made in
// fp32 either way. `table` as on the mesh.
Plan sum_as_fp32(const Plan& plan, const Table& table);
// Whether the links between nodes carry less then, over a ring, than where each rank sends each
// other one its part in 2 bytes a value. Not where what crosses nodes is a second sum, which is
// fp32 anyway.
bool ring_sends_less(const Mesh& mesh, const Table& table);

// What an update needs is read from disk while the one before runs: each read starts before that
// update, and the first two reads of optimizer state even before the norm. What a unit's backward
// is recomputed from comes back while the backward before it runs.
Plan read_ahead(const Plan& plan);

}  // namespace penstock
