#pragma once
// Groups: the ranks that one rank meets in collectives, worked out once. A pure value; any thread.
#include <vector>

#include "src/place/mesh.h"
#include "src/place/placement.h"

namespace penstock {

// The ranks of one collective, in shard order, and which of them this rank is.
struct Members {
  std::vector<int> ranks;
  int index = 0;
  int size() const { return static_cast<int>(ranks.size()); }
};

// Of the data ranks that `rank` is one of, the lowest that holds each shard under `place`, in shard
// order, and which of these `rank` is; < 0: none.
Members owners(const Placement& place, const Mesh& mesh, int rank);

class Groups {
 public:
  Groups(const Mesh& mesh, int rank);

  // The order of `axes` does not matter. The answer lives as long as this object; nothing is
  // allocated.
  const Members& of(const std::vector<Axis>& axes) const;
  const Members& everyone() const;
  const Members& data() const { return of({Axis::kNode, Axis::kLocal}); }
  const Members& tensor() const { return of({Axis::kTensor}); }
  const Members& pipeline() const { return of({Axis::kPipeline}); }
  // Of this stage of the pipeline: everyone where there is one.
  const Members& stage() const {
    return of({Axis::kNode, Axis::kLocal, Axis::kExpert, Axis::kSequence, Axis::kTensor});
  }

 private:
  // By the set of axes, one bit each. Axes of size one add nobody: their bit is left out, and sets
  // with it stay empty.
  std::vector<Members> members_;
  unsigned used_axes_ = 0;
};

}  // namespace penstock
