#include "src/place/mesh.h"

#include <gtest/gtest.h>

#include "penstock/error.h"

namespace penstock {
namespace {

constexpr Mesh kMesh{2, 3, 4};

TEST(MeshTest, CoordinatesNestWithTensorInnermost) {
  EXPECT_EQ(kMesh.world(), 24);
  EXPECT_EQ(kMesh.data(), 6);
  EXPECT_EQ(kMesh.text(), "node=2 local=3 tensor=4");
  for (int rank = 0; rank < kMesh.world(); ++rank) {
    const int node = kMesh.coordinate(rank, Axis::kNode);
    const int local = kMesh.coordinate(rank, Axis::kLocal);
    const int tensor = kMesh.coordinate(rank, Axis::kTensor);
    EXPECT_EQ((node * 3 + local) * 4 + tensor, rank);
  }
  EXPECT_THROW(kMesh.coordinate(24, Axis::kNode), Bug);
}

TEST(MeshTest, GroupsDifferOnlyAlongTheirAxes) {
  using Ranks = std::vector<int>;
  EXPECT_EQ(kMesh.group(5, {Axis::kTensor}), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(kMesh.group(5, {Axis::kLocal}), (Ranks{1, 5, 9}));
  EXPECT_EQ(kMesh.group(5, {Axis::kNode}), (Ranks{5, 17}));
  EXPECT_EQ(kMesh.group(5, {Axis::kNode, Axis::kLocal}), (Ranks{1, 5, 9, 13, 17, 21}));
  EXPECT_EQ(kMesh.group(5, {}), (Ranks{5}));
}

}  // namespace
}  // namespace penstock
