#include "src/place/groups.h"

#include <gtest/gtest.h>

namespace penstock {
namespace {

TEST(GroupsTest, AnswerAsTheMeshDoesForEverySetOfAxes) {
  Mesh all;
  all.sizes.fill(2);
  const Mesh meshes[] = {
      Mesh(),
      Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 3}}),
      Mesh::of({{Axis::kPipeline, 2}, {Axis::kLocal, 3}, {Axis::kTensor, 2}}),
      all,
  };
  for (const Mesh& mesh : meshes) {
    for (int rank = 0; rank < mesh.world(); rank += 5) {
      const Groups groups(mesh, rank);
      for (unsigned set = 0; set < 1U << kNumAxes; ++set) {
        std::vector<Axis> axes;
        for (size_t i = 0; i < kNumAxes; ++i)
          if ((set >> i & 1U) != 0) axes.insert(axes.begin(), kAxes[i].axis);
        const Members& members = groups.of(axes);
        EXPECT_EQ(members.ranks, mesh.group(rank, axes)) << mesh.text() << " set " << set;
        EXPECT_EQ(members.ranks.at(static_cast<size_t>(members.index)), rank);
      }
    }
  }
}

TEST(GroupsTest, TheSameGroupIsTheSameObject) {
  const Groups groups(Mesh::of({{Axis::kLocal, 4}}), 1);
  const Members& data = groups.of({Axis::kNode, Axis::kLocal});
  EXPECT_EQ(&data, &groups.of({Axis::kNode, Axis::kLocal}));
  EXPECT_EQ(&data, &groups.of({Axis::kLocal}));  // there is one node
}

TEST(GroupsTest, AShardIsOwnedByTheLowestRankThatHoldsIt) {
  const Mesh mesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});
  const auto owners_of = [&](const char* place) {
    return owners(Placement::parse(place), mesh, 2).ranks;
  };
  EXPECT_EQ(owners_of("SS@device:fp32"), (std::vector<int>{0, 2, 1, 3}));  // [Note: Shard order]
  EXPECT_EQ(owners_of("RS@device:fp32"), (std::vector<int>{0, 1}));
  EXPECT_EQ(owners_of("SR@device:fp32"), (std::vector<int>{0, 2}));
  EXPECT_EQ(owners_of("RR@device:fp32"), (std::vector<int>{0}));
  EXPECT_EQ(owners(Placement::parse("RS@device:fp32"), mesh, 1).index, 1);
  EXPECT_EQ(owners(Placement::parse("RS@device:fp32"), mesh, 3).index, -1);
}

}  // namespace
}  // namespace penstock
