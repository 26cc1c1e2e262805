#pragma once
// The base of deltas. Its functions may be called by the lane that publishes, after the update's
// fences. The model's thread may call them while no update and no publish runs.
//
// [Note: Deltas] With a lossy table.wire.publish, a rank does not send its updated parameters. It
// sends, encoded, the difference between them and the parameters at rest. All ranks, the sender
// too, add the decoded delta to the parameters at rest, with equal results. The rounding error of
// the encoding stays in the difference between the masters and the parameters at rest. So the next
// delta includes it (error feedback, as EF21 in arXiv:2106.05203), and no residual is kept. The
// update before an exact step, loads, gathered(write=True) and close() publish the values
// themselves.
//
// With deltas, a parameter at rest is not its rounded master, so comparing the two does not show
// whether users wrote to it. The comparison needs a copy of the published values: the base
// (Flat::base, the cell param.update), for the shard that this rank updates. An edit adds the same
// amount to the master as to the parameter at rest, so the master keeps changes that were not
// published yet. Otherwise, a loop that multiplies all weights by a number after each step would
// lose all small updates.
#include "src/device/kernels.h"
#include "src/exec/rank.h"

namespace penstock::exec {

// Copies the parameters at rest to the base. Must be called after each write of the engine to these
// parameters. Does nothing for a table without a base.
void renew_base(Rank& rank, Flat& flat);
void renew_base(Rank& rank, const std::vector<int>& units);

// Values as users see them, in the flat's dtype. Indices count from the first element of the flat
// that this rank updates.
struct SeenValues {
  device::Address at;  // of the value `first`
  int64_t first = 0, numel = 0;
};
// Copies edits to the base and to the fp32 masters of these values (device::take_edits). `masters`
// must be in the same memory as the values.
void take_edits(const Rank& rank, Flat& flat, const SeenValues& seen, device::Address masters);

}  // namespace penstock::exec
