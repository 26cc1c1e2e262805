#pragma once
// Route: a list of moves as passes over the data. The plain walk makes one pass a move; what makes
// it fast is pairs of moves that one pass does, recognised here and nowhere else, so the simulator
// counts the buffers that the executor takes. Pure values; any thread.
//
// [Note: Fusions]
//   slice, copy, cast      one pass: a part is read, converted and written to its tier
//   ... ; all_gather       the pass before writes this rank's shard into the gathered copy itself
//   reduce_scatter; ...    the sum is written in its last dtype to its last tier, and added there
//   all_reduce             in place where nothing else changes: the partial sum becomes the sum
//   sum; sum               what is between two sums stays in fp32
//   update; publish        the optimizer's pass also writes what the publish begins with, where
//                          that ends in the resting copy or in this rank's shard of it
// P stands for a mean that is still due: each sum divides by the ranks that it adds up.
#include <cstdint>
#include <vector>

#include "src/place/placement.h"

namespace penstock {

enum class PassKind : uint8_t { kLocal, kAllGather, kReduceScatter, kAllReduce };

struct Pass {
  PassKind kind{};
  std::vector<Axis> axes{};  // of a collective; local: those that it cuts
  Placement from{}, to{};
  int parts = 1, part = 0;  // local: the output is that part of the input
  bool operator==(const Pass&) const = default;

  bool sums() const { return kind == PassKind::kReduceScatter || kind == PassKind::kAllReduce; }
};

struct Route {
  Placement from, to;
  std::vector<Pass> passes;

  // The result is in the buffer that the source was in.
  bool in_place() const;
  bool local() const;  // no peer takes part
  // Whether a pass writes into this rank's shard of what the next one gathers.
  bool into_next(size_t pass) const;
  // Whether a pass writes to where the route ends: those after it are made in place.
  bool ends_at(size_t pass) const;
  // Of a publish: its first pass can be the optimizer's.
  bool joins_update() const;
  // The dtype after a pass, for a buffer that comes in one dtype and ends in another.
  Dtype dtype_after(size_t pass, Dtype first, Dtype last) const;
};

// For `rank`. `consumes`: the source's buffer may be overwritten. Throws ConfigError where a move
// cannot start.
Route route(const Placement& from, const std::vector<Move>& moves, const Mesh& mesh, int rank,
            bool consumes = true);

}  // namespace penstock
