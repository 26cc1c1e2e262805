#pragma once
// The base of deltas. Its functions are used by the lane that publishes, after the update's fences,
// or by the model's thread while no update and no publish runs.
//
// [Note: Deltas] With a lossy table.wire.publish, a rank does not send its updated parameters but
// what they differ by from those at rest, encoded. All ranks, the sender too, add the decoded delta
// to the parameters at rest, with equal results. What the encoding rounds away stays in the
// difference between the masters and the parameters at rest, so the next delta has it (error
// feedback, as EF21 in arXiv:2106.05203), and no residual is kept. The update before an exact step,
// loads, gathered(write=True) and close() publish the values themselves.
//
// Then a parameter at rest is not its rounded master, so only a copy shows which parameters users
// have written to: the base (Flat::base, the cell param.update) is what was published of the shard
// that this rank updates. An edit changes the master by as much as the parameter at rest: what was
// not published yet stays unpublished. Otherwise, a loop that multiplies all weights by a number
// after each step would lose all small updates.
#include "src/device/kernels.h"
#include "src/exec/rank.h"

namespace penstock::exec {

// Copies the parameters at rest to the base. Must follow each write by the engine. Does nothing for
// a table without a base.
void renew_base(Rank& rank, Flat& flat);
void renew_base(Rank& rank, const std::vector<int>& units);

// Values as users see them, in the flat's dtype. Indices count from the first element of the flat
// that this rank updates.
struct SeenValues {
  device::Address at;  // of the value `first`
  int64_t first = 0, numel = 0;
};
// Takes edits to the fp32 masters of these values, in the same memory, and to the base
// (device::take_edits).
void take_edits(const Rank& rank, Flat& flat, const SeenValues& seen, device::Address masters);

}  // namespace penstock::exec
