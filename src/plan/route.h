#pragma once
// Route: the passes over the data that carry out a list of moves. Without fusions, each move would
// be one pass; a route joins certain moves in one pass. Only this file decides which moves are
// joined, so the simulator counts exactly the buffers that the executor takes. Plain values, usable
// from any thread.
//
// [Note: Fusions]
//   slice, copy, cast      one pass reads a part, converts it and writes it to the last tier
//   ... ; all_gather       the pass before the gather writes its result straight into this rank's
//                          shard of the gathered copy. A gather of deltas needs the old values of
//                          the gathered copy, so its input has a buffer of its own; its result
//                          replaces the old values
//   reduce_scatter; ...    the sum is written to the last tier in the last dtype; if a sum is there
//                          already, the new sum is added to it
//   all_reduce             works in place if nothing else changes: the partial sum becomes the sum
//   sum; sum               values between two sums stay in fp32
//   update; publish        the first pass of the publish joins the pass of the update if the
//                          publish pass writes to the resting copy or to this rank's shard of it
// P stands for an incomplete mean: each sum is divided by the number of ranks whose values it adds.
#include <cstdint>
#include <optional>
#include <vector>

#include "src/place/placement.h"

namespace penstock {

enum class PassKind : uint8_t { kLocal, kAllGather, kReduceScatter, kAllReduce };

struct Pass {
  PassKind kind{};
  std::vector<Axis> axes{};  // collective: its axes; local: the axes of the cut
  Placement from{}, to{};
  int parts = 1, part = 0;  // local: the output is this part of the input
  Wire wire{};              // of a collective
  bool operator==(const Pass&) const = default;

  bool sums() const { return kind == PassKind::kReduceScatter || kind == PassKind::kAllReduce; }
};

struct Route {
  Placement from, to;
  std::vector<Pass> passes;

  // Returns whether the result is in the buffer of the source.
  bool in_place() const;
  bool local() const;  // no peer takes part
  // Returns whether the route only copies values from disk. If units compute in host memory, the
  // values are read straight to their destination, without a copy beside it.
  bool only_reads() const;
  // Returns whether a pass writes into this rank's shard of the next pass's gather buffer.
  bool into_next(size_t pass) const;
  // Returns whether all passes after this one work in place, so that the output of this pass is in
  // the buffer of the route's result.
  bool ends_at(size_t pass) const;
  // For a publish: returns whether the optimizer can do the first pass of the route.
  bool joins_update() const;
  // Returns the dtype after a pass, for a source buffer of dtype `first` and a result of `last`.
  Dtype dtype_after(size_t pass, Dtype first, Dtype last) const;
};

// Builds the route for `rank`. `consumes`: the source's buffer may be overwritten. Throws
// ConfigError if a move cannot start.
Route route(const Placement& from, const std::vector<Move>& moves, const Mesh& mesh, int rank,
            bool consumes = true);

// Returns the index of the pass that adds the residual at `rest` to the addends of its sum ([Note:
// Residuals]). It is the sum by a lossy wire or, in a route without one, the first plain sum whose
// addends fit the residual. Returns nothing if the route has no such pass.
std::optional<size_t> residual_pass(const Route& route, const Placement& rest);

}  // namespace penstock
