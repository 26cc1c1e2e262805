#pragma once
// Groups: the ranks with which one rank makes collectives. They are computed once. A plain value,
// usable from any thread.
#include <vector>

#include "src/place/mesh.h"
#include "src/place/placement.h"

namespace penstock {

// The ranks of one collective, and this rank's index among them.
struct Members {
  std::vector<int> ranks;
  int index = 0;
  int size() const { return static_cast<int>(ranks.size()); }
  // Returns all ranks of a group of `size` ranks, for its rank `rank`.
  static Members all(int rank, int size);
};

// Returns one owner for each shard under `place`, in shard order: the lowest rank that holds the
// shard, among the data ranks of `rank`. `index` is the shard that `rank` owns, or negative if
// `rank` owns none.
Members owners(const Placement& place, const Mesh& mesh, int rank);

class Groups {
 public:
  Groups(const Mesh& mesh, int rank);

  // Returns the ranks along `axes` in shard order; the order of `axes` does not matter. The result
  // lives as long as this object. Allocates nothing.
  const Members& of(const std::vector<Axis>& axes) const;
  const Members& everyone() const { return everyone_; }  // in ascending order
  const Members& data() const { return of({Axis::kNode, Axis::kLocal}); }
  const Members& tensor() const { return of({Axis::kTensor}); }
  const Members& pipeline() const { return of({Axis::kPipeline}); }
  // The ranks of this pipeline stage in ascending order; all ranks if there is one stage.
  const Members& stage() const { return stage_; }

 private:
  // Indexed by the set of axes, one bit each. Before a lookup, the bits of axes of size one are
  // cleared, so all entries with such a bit stay empty.
  std::vector<Members> members_;
  unsigned used_axes_ = 0;
  Members everyone_, stage_;
};

}  // namespace penstock
