#include "src/place/mesh.h"

#include <gtest/gtest.h>

#include "penstock/error.h"

namespace penstock {
namespace {

const Mesh kMesh = Mesh::of({{Axis::kTensor, 4}, {Axis::kNode, 2}, {Axis::kLocal, 3}});

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

TEST(MeshTest, TextParsesBack) {
  EXPECT_EQ(Mesh::parse(kMesh.text()), kMesh);
  for (const char* wrong :
       {"", "node=2", "local=3 node=2", "node=2 local=0 tensor=1", "node=2 tensor=1 local=3",
        "node=2 local=3 tensor=4 ", "node=2 local=3 tensor=4x"}) {
    EXPECT_THROW(Mesh::parse(wrong), ConfigError) << wrong;
  }
}

TEST(MeshTest, GroupsDifferOnlyAlongTheirAxes) {
  using Ranks = std::vector<int>;
  EXPECT_EQ(kMesh.group(5, {Axis::kTensor}), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(kMesh.group(5, {Axis::kLocal}), (Ranks{1, 5, 9}));
  EXPECT_EQ(kMesh.group(5, {Axis::kNode}), (Ranks{5, 17}));
  EXPECT_EQ(kMesh.group(5, {Axis::kNode, Axis::kLocal}), (Ranks{1, 13, 5, 17, 9, 21}));
  EXPECT_EQ(kMesh.group(5, {Axis::kLocal, Axis::kNode}),
            kMesh.group(5, {Axis::kNode, Axis::kLocal}));
  EXPECT_EQ(kMesh.group(5, {Axis::kPipeline}), (Ranks{5}));
  EXPECT_EQ(kMesh.group(5, {}), (Ranks{5}));
}

TEST(MeshTest, AxesAreOneUnlessSet) {
  EXPECT_EQ(Mesh().world(), 1);
  EXPECT_EQ(Mesh().text(), "node=1 local=1");
  const Mesh mesh = Mesh::of({{Axis::kPipeline, 2}, {Axis::kSequence, 3}, {Axis::kLocal, 2}});
  EXPECT_EQ(mesh.text(), "pipeline=2 node=1 local=2 sequence=3");
  EXPECT_EQ(mesh.world(), 12);
  EXPECT_EQ(mesh.data(), 2);
  EXPECT_THROW(Mesh::of({{Axis::kLocal, 0}}), Bug);
}

TEST(MeshTest, EveryAxisNestsInItsPlace) {
  Mesh mesh;
  mesh.sizes.fill(2);
  for (int rank = 0; rank < mesh.world(); ++rank) {
    int again = 0;
    for (const AxisRow& row : kAxes) again = again * 2 + mesh.coordinate(rank, row.axis);
    EXPECT_EQ(again, rank);
    for (const AxisRow& row : kAxes) {
      const std::vector<int> group = mesh.group(rank, {row.axis});
      EXPECT_EQ(group[static_cast<size_t>(mesh.coordinate(rank, row.axis))], rank) << row.name;
    }
  }
  EXPECT_EQ(mesh.group(0, {Axis::kTensor})[1], 1);
  EXPECT_EQ(mesh.group(0, {Axis::kPipeline})[1], mesh.world() / 2);
}

}  // namespace
}  // namespace penstock
