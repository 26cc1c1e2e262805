#include "src/place/model_placement.h"

#include <gtest/gtest.h>

namespace penstock {
namespace {

ModelPlacement placement(Axis axis, Layout layout, std::vector<int> holders = {}) {
  ModelPlacement place;
  place.on(axis) = {layout, std::move(holders)};
  return place;
}

// Ranks 0..7: pipeline x local x tensor.
const Mesh kRanks = Mesh::of({{Axis::kPipeline, 2}, {Axis::kLocal, 2}, {Axis::kTensor, 2}});

std::vector<int> counting(const ModelPlacement& place) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kRanks.world(); ++rank) {
    if (place.is_counted_by(kRanks, rank)) ranks.push_back(rank);
  }
  return ranks;
}

TEST(ModelPlacementTest, CountsEqualValuesOnce) {
  EXPECT_EQ(counting({}), (std::vector<int>{0, 2}));
  EXPECT_EQ(counting(placement(Axis::kTensor, Layout::kPartial)), (std::vector<int>{0, 2}));
  EXPECT_EQ(counting(placement(Axis::kTensor, Layout::kSharded)), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(counting(placement(Axis::kPipeline, Layout::kReplicated, {1})),
            (std::vector<int>{4, 6}));
  EXPECT_EQ(counting(placement(Axis::kPipeline, Layout::kPartial, {0, 1})),
            (std::vector<int>{0, 2}));
}

TEST(ModelPlacementTest, CountsAddendsOverAllAxes) {
  ModelPlacement place = placement(Axis::kTensor, Layout::kPartial);
  EXPECT_EQ(place.num_addends(kRanks), 2);
  place.on(Axis::kPipeline) = {Layout::kPartial, {0, 1}};
  EXPECT_EQ(place.num_addends(kRanks), 4);
  EXPECT_EQ(place.text(), "pipeline={0,1}P,tensor=P");
  EXPECT_EQ(ModelPlacement().num_addends(kRanks), 1);
  EXPECT_EQ(ModelPlacement().text(), "");
}

TEST(ModelPlacementTest, ComparesOnlyRanksWithEqualValues) {
  const ModelPlacement cut = placement(Axis::kTensor, Layout::kSharded);
  EXPECT_TRUE(cut.is_alike(kRanks, 0, 2));
  EXPECT_FALSE(cut.is_alike(kRanks, 0, 1));
  const ModelPlacement first = placement(Axis::kPipeline, Layout::kReplicated, {0});
  EXPECT_TRUE(first.is_alike(kRanks, 0, 3));
  EXPECT_FALSE(first.is_alike(kRanks, 0, 4));
  EXPECT_TRUE(placement(Axis::kPipeline, Layout::kPartial, {0, 1}).is_alike(kRanks, 1, 7));
}

// Ranks 0 to 7: two nodes of two pairs; the ranks of a pair have different experts.
TEST(ModelPlacementTest, PlacesExpertsOverSomeDataRanks) {
  const Mesh run = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 4}});
  ModelPlacement experts;
  EXPECT_EQ(experts.mesh(run), run);
  EXPECT_EQ(experts.num_summed(), 1);
  experts.divide_experts(2);
  EXPECT_EQ(experts.mesh(run), Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}, {Axis::kExpert, 2}}));
  EXPECT_EQ(experts.num_summed(), 2);
  EXPECT_EQ(experts.text(), "expert=S");
  EXPECT_TRUE(experts.is_sharded());
  EXPECT_TRUE(experts.is_alike(run, 0, 2));
  EXPECT_TRUE(experts.is_alike(run, 1, 7));
  EXPECT_FALSE(experts.is_alike(run, 0, 1));
  EXPECT_FALSE(experts.is_alike(run, 2, 5));
  for (int rank = 0; rank < run.world(); ++rank) EXPECT_TRUE(experts.is_counted_by(run, rank));
}

TEST(ModelPlacementTest, ListsHoldersInOrder) {
  const Mesh mesh = Mesh::of({{Axis::kPipeline, 4}, {Axis::kTensor, 2}});
  const ModelPlacement tied = placement(Axis::kPipeline, Layout::kPartial, {0, 3});
  const Members on_last = holders(tied, Axis::kPipeline, mesh, 7);
  EXPECT_EQ(on_last.ranks, (std::vector<int>{1, 7}));
  EXPECT_EQ(on_last.index, 1);
  EXPECT_EQ(holders(tied, Axis::kPipeline, mesh, 2).index, -1);
  EXPECT_EQ(holders(tied, Axis::kTensor, mesh, 0).ranks, (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace penstock
