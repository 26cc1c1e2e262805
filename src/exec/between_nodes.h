#pragma once
// Gathers, through the devices, of values that are needed in host memory.
//
// [Note: Values between nodes] Values for users (state dicts, exports, full gradients) end in host
// memory. The ranks of one node exchange them through shared memory, at the speed of host memory.
// Between nodes, the group's exchanges are slower than the network of the devices. So if ranks meet
// on their devices, values that are sharded over nodes travel through the devices, on whatever tier
// they rest. They travel in pieces, so a gather takes little memory of the device.
#include "src/exec/rank.h"

namespace penstock::exec {

// One rank's shard of a flat with `numel` elements. `own` may be on any tier but the disk.
struct FlatShard {
  const FlatMesh& over;
  Placement place;
  device::Address own;
  int64_t numel = 0;
};

// Returns whether gather_between_nodes() gathers copies with this placement.
bool meets_between_nodes(const Rank& rank, const Placement& place);

// [ranks along the sharded axes] Gathers the flat in pieces that need at most 32 MiB of the device.
// Writes it to `full`, which is host memory for `numel` elements of `dtype`, or null on ranks that
// do not need the values. The gather lane must be able to run. Returns when `full` is written.
void gather_between_nodes(Rank& rank, Lanes& lanes, const FlatShard& shard,
                          const comm::Label& label, char* full, Dtype dtype);

}  // namespace penstock::exec
