#include "src/place/mesh.h"

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

const char* axis_name(Axis axis) {
  static constexpr std::array<const char*, kNumAxes> kNames = {"node", "local", "tensor"};
  return kNames[static_cast<size_t>(axis)];
}

int Mesh::size(Axis axis) const {
  const std::array<int, kNumAxes> sizes = {node, local, tensor};
  return sizes[static_cast<size_t>(axis)];
}

int Mesh::coordinate(int rank, Axis axis) const {
  PENSTOCK_ASSERT(rank >= 0 && rank < world(), concat("rank ", rank, " outside ", text()));
  switch (axis) {
    case Axis::kNode:
      return rank / tensor / local;
    case Axis::kLocal:
      return rank / tensor % local;
    case Axis::kTensor:
      return rank % tensor;
  }
  PENSTOCK_ASSERT(false, "no such axis");
}

std::vector<int> Mesh::group(int rank, const std::vector<Axis>& axes) const {
  std::vector<int> ranks;
  for (int other = 0; other < world(); ++other) {
    bool same = true;
    for (const Axis axis : {Axis::kNode, Axis::kLocal, Axis::kTensor}) {
      const bool free = std::find(axes.begin(), axes.end(), axis) != axes.end();
      same = same && (free || coordinate(rank, axis) == coordinate(other, axis));
    }
    if (same) ranks.push_back(other);
  }
  return ranks;
}

std::string Mesh::text() const {
  return concat("node=", node, " local=", local, " tensor=", tensor);
}

}  // namespace penstock
