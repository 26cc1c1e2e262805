#include "src/place/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {
namespace {

std::string hops_text(const std::string& from, const std::string& to) {
  std::vector<std::string> texts;
  for (const Move& move : hops(Placement::parse(from), Placement::parse(to)))
    texts.push_back(move.text());
  return join(texts, "; ");
}

std::vector<Placement> every_placement(const std::vector<Dtype>& dtypes) {
  std::vector<Placement> places;
  for (const Layout node : {Layout::kReplicated, Layout::kSharded, Layout::kPartial})
    for (const Layout local : {Layout::kReplicated, Layout::kSharded, Layout::kPartial})
      for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kDisk})
        for (const Dtype dtype : dtypes) {
          Placement place{.tier = tier, .dtype = dtype};
          place.on(Axis::kNode) = node;
          place.on(Axis::kLocal) = local;
          places.push_back(place);
        }
  return places;
}

// Every combination of layouts over all axes, on the device in fp32.
std::vector<Placement> every_layout() {
  std::vector<Placement> places = {Placement()};
  for (const AxisRow& row : kAxes) {
    std::vector<Placement> wider;
    for (Placement place : places) {
      for (const Layout layout : {Layout::kReplicated, Layout::kSharded, Layout::kPartial}) {
        if (layout == Layout::kSharded && !row.shards_state) continue;
        place.on(row.axis) = layout;
        wider.push_back(place);
      }
    }
    places = wider;
  }
  return places;
}

TEST(PlacementTest, TextParses) {
  for (const Placement& place :
       every_placement({Dtype::kFp32, Dtype::kBf16, Dtype::kFp16, Dtype::kInt8, Dtype::kInt4}))
    EXPECT_EQ(Placement::parse(place.text()), place);
  for (const Placement& place : every_layout()) EXPECT_EQ(Placement::parse(place.text()), place);
  for (const char* text : {"SS,tensor=P@device:bf16", "RR,pipeline=P,sequence=S@host:fp32"})
    EXPECT_EQ(Placement::parse(text).text(), text);
  EXPECT_EQ(Placement::parse("SS,tensor=R@host:bf16").text(), "SS@host:bf16");
  EXPECT_EQ(Placement::parse("SR@host:bf16").on(Axis::kNode), Layout::kSharded);
  for (const char* wrong :
       {"", "SR", "SRR@host:bf16", "SX@host:bf16", "SR@hots:bf16", "SR@host:fp64", "SR@host",
        "S:R@host", "SR,@host:bf16", "SR,tensor@host:bf16", "SR,tensor=@host:bf16",
        "SR,tensor=X@host:bf16", "SR,tensor=SP@host:bf16", "SR,tensor=P,tensor=P@host:bf16",
        "SR,node=P@host:bf16", "SR,tensro=P@host:bf16", "@host:bf16", "SR,pipeline=S@host:bf16"})
    EXPECT_THROW(Placement::parse(wrong), ConfigError) << wrong;
}

TEST(PlacementTest, ErrorsNameTheNearestWord) {
  try {
    parse_tier("hots");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'host'"), std::string::npos);
  }
}

TEST(PlacementTest, MovesParse) {
  for (const char* text : {"all_gather(data)", "all_gather(local)", "reduce_scatter(node)",
                           "all_reduce(tensor)", "slice(local)", "all_gather(data,tensor)",
                           "all_reduce(pipeline,data,sequence)", "slice(local,expert)",
                           "copy(device,host)", "copy(disk,host)", "cast(bf16)", "cast(int8/128)"})
    EXPECT_EQ(parse_move(text).text(), text);
  for (const char* wrong :
       {"", "gather(data)", "all_gather", "all_gather(", "all_gather(dat)", "copy(host)",
        "copy(host,)", "cast()", "slice(data,local)", "slice(local,)", "slice(tensor,tensor)"})
    EXPECT_THROW(parse_move(wrong), ConfigError) << wrong;
}

TEST(PlacementTest, QuantizedBuffersHaveTheirScales) {
  EXPECT_EQ(buffer_bytes(Dtype::kBf16, 1000), 2000);
  EXPECT_EQ(buffer_bytes(Dtype::kInt8, 128), 512);
  EXPECT_EQ(buffer_bytes(Dtype::kInt8, 1 << 20), (1 << 20) + (1 << 13) * 4);
  EXPECT_EQ(buffer_bytes(Dtype::kInt4, 1 << 20), (1 << 19) + (1 << 14) * 4);
  EXPECT_EQ(buffer_bytes(Dtype::kInt4, 0), 0);
  EXPECT_THROW(dtype_bytes(Dtype::kInt8), Bug);
}

// Collectives cannot read quantized values, and the fewest bytes are copied.
TEST(PlacementTest, QuantizedValuesAreDecodedBeforeCollectives) {
  EXPECT_EQ(hops_text("SS@disk:int8/128", "RR@device:bf16"),
            "copy(disk,host); copy(host,device); cast(bf16); all_gather(data)");
  EXPECT_EQ(hops_text("RR@host:int4/64", "RR@device:fp32"), "copy(host,device); cast(fp32)");
  EXPECT_EQ(hops_text("RR@device:int8/128", "RR@device:bf16"), "cast(bf16)");
  EXPECT_EQ(hops_text("RR@device:fp32", "SS@device:int8/128"), "slice(data); cast(int8/128)");
  EXPECT_EQ(hops_text("SS@disk:int8/128", "SS@host:int8/128"), "copy(disk,host)");
}

TEST(PlacementTest, ShardsOverNodesAreInsideThoseOverLocalRanks) {
  const Mesh mesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 3}, {Axis::kTensor, 2}});
  const int rank = (1 * 3 + 0) * 2 + 1;  // node 1, local 0, tensor 1
  const auto shard = [&](const char* text) {
    const Placement place = Placement::parse(text);
    return std::pair(shard_index(place, mesh, rank), num_shards(place, mesh));
  };
  EXPECT_EQ(shard("SS@device:fp32"), std::pair(1, 6));
  EXPECT_EQ(shard("SR@device:fp32"), std::pair(1, 2));
  EXPECT_EQ(shard("RS@device:fp32"), std::pair(0, 3));
  EXPECT_EQ(shard("RP@device:fp32"), std::pair(0, 1));
  EXPECT_EQ(shard("SS,tensor=S@device:fp32"), std::pair(3, 12));
  EXPECT_EQ(shard("SR,tensor=S@device:fp32"), std::pair(3, 4));
  EXPECT_EQ(shard("SR,sequence=S@device:fp32"), std::pair(1, 2));
}

TEST(PlacementTest, OneDataRankHoldsEverything) {
  const Placement place = Placement::parse("SP@host:bf16");
  EXPECT_EQ(normalize(place, Mesh::of({{Axis::kTensor, 4}})).text(), "RR@host:bf16");
  // A data axis of size one takes the layout of the other data axis.
  EXPECT_EQ(normalize(place, Mesh::of({{Axis::kLocal, 2}})).text(), "PP@host:bf16");
  EXPECT_EQ(normalize(place, Mesh::of({{Axis::kNode, 2}})).text(), "SS@host:bf16");
  EXPECT_EQ(normalize(place, Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}})), place);
}

TEST(PlacementTest, AxesOfSizeOneAreReplicated) {
  const Mesh mesh = Mesh::of({{Axis::kLocal, 2}, {Axis::kTensor, 2}});
  EXPECT_EQ(normalize(Placement::parse("SS,pipeline=P,tensor=P@host:bf16"), mesh).text(),
            "SS,tensor=P@host:bf16");
}

struct HopsCase {
  const char *from, *to, *moves;
};

TEST(HopsTest, MovesReadAsExpected) {
  const HopsCase cases[] = {
      {"SS@device:bf16", "SS@device:bf16", ""},
      {"SS@device:bf16", "RR@device:bf16", "all_gather(data)"},
      {"RS@device:bf16", "RR@device:bf16", "all_gather(local)"},
      {"RR@device:bf16", "RS@device:bf16", "slice(local)"},
      {"RR@device:bf16", "SS@device:bf16", "slice(data)"},
      {"RR@device:bf16", "SS@host:bf16", "slice(data); copy(device,host)"},
      {"PP@device:bf16", "SS@device:fp32", "reduce_scatter(data); cast(fp32)"},
      {"PP@device:bf16", "RS@device:bf16", "reduce_scatter(local); all_reduce(node)"},
      {"PP@device:bf16", "SR@device:bf16", "reduce_scatter(node); all_reduce(local)"},
      {"PP@device:bf16", "RR@device:bf16", "all_reduce(data)"},
      {"PP@device:bf16", "SS@host:fp32", "reduce_scatter(data); copy(device,host); cast(fp32)"},
      {"SS@host:fp32", "SS@device:bf16", "cast(bf16); copy(host,device)"},
      {"SS@host:fp32", "RR@device:bf16", "cast(bf16); copy(host,device); all_gather(data)"},
      {"SS@disk:bf16", "RR@device:bf16", "copy(disk,host); copy(host,device); all_gather(data)"},
      {"SS@host:bf16", "RR@host:bf16", "copy(host,device); all_gather(data); copy(device,host)"},
      {"SS@disk:fp32", "SS@host:fp32", "copy(disk,host)"},
      {"SS@device:bf16", "SS@device:fp16", "cast(fp16)"},
      {"SR@device:bf16", "RS@device:bf16", "all_gather(node); slice(local)"},
      // An inner axis that stays sharded is gathered for a change of an outer axis.
      {"SS@device:bf16", "SR@device:bf16", "all_gather(data); slice(node)"},
      {"SR@device:bf16", "SS@device:bf16", "all_gather(node); slice(data)"},
      {"SP@device:bf16", "SS@device:bf16", "all_gather(node); reduce_scatter(local); slice(node)"},
      {"SP@device:bf16", "SR@device:bf16", "all_reduce(local)"},
      {"SR@host:bf16", "SS@host:bf16",
       "copy(host,device); all_gather(node); slice(data); copy(device,host)"},
      // A change of the inner axis leaves the outer axis as it is ([Note: Shard order]).
      {"SS@device:bf16", "RS@device:bf16", "all_gather(node)"},
      {"RS@device:bf16", "SS@device:bf16", "slice(node)"},
      {"PS@device:bf16", "SS@device:bf16", "reduce_scatter(node)"},
      {"PS@device:bf16", "RS@device:bf16", "all_reduce(node)"},
      {"RS@host:bf16", "SS@host:bf16", "slice(node)"},
      {"SS,tensor=P@device:fp32", "SS@device:fp32", "all_reduce(tensor)"},
      {"PP,tensor=P@device:fp32", "SS@device:fp32", "reduce_scatter(data); all_reduce(tensor)"},
      {"SS,tensor=S@device:fp32", "RR@device:fp32", "all_gather(data,tensor)"},
      {"RR,tensor=S@device:fp32", "SS,tensor=S@device:fp32",
       "all_gather(tensor); slice(data,tensor)"},
      // The inner axis is not gathered if the outer axes only have sums.
      {"RR,pipeline=P,tensor=S@device:fp32", "RR,tensor=S@device:fp32", "all_reduce(pipeline)"},
  };
  for (const HopsCase& c : cases) EXPECT_EQ(hops_text(c.from, c.to), c.moves) << c.from;
}

TEST(HopsTest, WhatCannotMoveIsAnError) {
  for (const auto& [from, to, axis] : {std::tuple("RR", "PP", "node"),
                                       {"SS", "PP", "node"},
                                       {"RR", "RP", "local"},
                                       {"RR", "RR,tensor=P", "tensor"}}) {
    try {
      hops_text(concat(from, "@device:fp32"), concat(to, "@device:fp32"));
      ADD_FAILURE() << from << " to " << to;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(concat("over ", axis)), std::string::npos)
          << error.what();
    }
  }
}

TEST(PlacementTest, MovesStartOnlyWhereTheyCan) {
  const std::pair<const char*, const char*> wrong[] = {
      {"SS@host:fp32", "all_gather(data)"},
      {"SS@device:fp32", "all_gather(tensor)"},
      {"SS@device:fp32", "all_gather(local)"},  // shards would not be contiguous
      {"SR@device:fp32", "slice(local)"},
      {"RR,sequence=S@device:fp32", "slice(local)"},
      {"SS,tensor=S@device:fp32", "all_gather(data)"},
      {"SS@device:fp32", "all_to_all(local)"},  // layers alone make these
      {"SS@device:fp32", "shift(local)"},
  };
  for (const auto& [from, move] : wrong)
    EXPECT_THROW(apply(Placement::parse(from), parse_move(move)), ConfigError) << from << move;
  EXPECT_EQ(
      apply(Placement::parse("SS,tensor=S@device:fp32"), parse_move("all_gather(data,tensor)")),
      Placement());
}

// The copies of one range of numbers on all ranks, in one thread.
class World {
 public:
  World(const Mesh& mesh, const Placement& place) : mesh_(mesh), place_(place) {
    const int num_shards = penstock::num_shards(place, mesh);
    double share = 1;  // what each rank contributes to each number of a partial sum
    for (const AxisRow& row : kAxes)
      if (place.on(row.axis) == Layout::kPartial) share /= mesh.size(row.axis);
    for (int rank = 0; rank < mesh.world(); ++rank) {
      const int size = kNumel / num_shards;
      std::vector<double> mine;
      for (int i = 0; i < size; ++i)
        mine.push_back(share * (1 + shard_index(place, mesh, rank) * size + i));
      copies_.push_back(mine);
    }
  }

  void apply(const Move& move) {
    place_ = penstock::apply(place_, move);
    if (move.axes.empty()) return;
    const std::vector<std::vector<double>> before = copies_;
    for (int rank = 0; rank < mesh_.world(); ++rank) {
      const std::vector<int> group = mesh_.group(rank, move.axes);
      std::vector<double> whole = before[group[0]];
      for (size_t i = 1; i < group.size(); ++i) {
        const auto& other = before[group[i]];
        if (move.kind == MoveKind::kAllGather)
          whole.insert(whole.end(), other.begin(), other.end());
        if (move.kind == MoveKind::kAllReduce || move.kind == MoveKind::kReduceScatter)
          for (size_t j = 0; j < whole.size(); ++j) whole[j] += other[j];
      }
      copies_[rank] = whole;
      if (move.kind == MoveKind::kAllGather || move.kind == MoveKind::kAllReduce) continue;
      const auto position = std::find(group.begin(), group.end(), rank) - group.begin();
      const auto size = static_cast<std::ptrdiff_t>(whole.size() / group.size());
      const auto begin = whole.begin() + position * size;
      copies_[rank] = {begin, begin + size};
    }
  }

  const std::vector<std::vector<double>>& copies() const { return copies_; }

 private:
  static constexpr int kNumel = 24;
  Mesh mesh_;
  Placement place_;
  std::vector<std::vector<double>> copies_;
};

// No moves turn a sum back into partial sums; all other pairs have moves.
bool has_way(const Placement& from, const Placement& to) {
  return std::all_of(kAxes.begin(), kAxes.end(), [&](const AxisRow& row) {
    return to.on(row.axis) != Layout::kPartial || from.on(row.axis) == Layout::kPartial;
  });
}

// Calls `check` for every ordered pair, or for one pair in `stride`.
template <typename Check>
void for_pairs(const std::vector<Placement>& places, size_t stride, const Check& check) {
  for (size_t i = 0; i < places.size() * places.size(); i += stride)
    check(places[i / places.size()], places[i % places.size()]);
}

void expect_moves(const Placement& from, const Placement& to) {
  if (has_way(from, to)) {
    Placement at = from;
    for (const Move& move : hops(from, to)) at = apply(at, move);
    ASSERT_EQ(at, to) << from.text() << " to " << to.text() << " ends at " << at.text();
  } else {
    ASSERT_THROW(hops(from, to), ConfigError) << from.text() << " to " << to.text();
  }
}

TEST(HopsTest, EveryPairHasMovesUnlessASumWouldBeUndone) {
  for_pairs(every_placement({Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}), 1, expect_moves);
  for_pairs(every_layout(), 11, expect_moves);
}

void expect_right_numbers(const Mesh& mesh, const Placement& from, const Placement& to) {
  if (!has_way(from, to)) return;
  World world(mesh, from);
  for (const Move& move : hops(from, to)) world.apply(move);
  const World wanted(mesh, to);
  for (int rank = 0; rank < mesh.world(); ++rank) {
    const auto& mine = world.copies()[rank];
    const auto& expected = wanted.copies()[rank];
    ASSERT_EQ(mine.size(), expected.size()) << from.text() << " to " << to.text();
    for (size_t i = 0; i < mine.size(); ++i)
      ASSERT_NEAR(mine[i], expected[i], 1e-12) << from.text() << " to " << to.text();
  }
}

TEST(HopsTest, MovesBringTheRightNumbers) {
  const auto places = every_placement({Dtype::kFp32, Dtype::kBf16});
  const Mesh meshes[] = {
      Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 3}}),
      Mesh::of({{Axis::kLocal, 4}}),
      Mesh::of({{Axis::kNode, 4}, {Axis::kTensor, 2}}),
  };
  for (const Mesh& mesh : meshes)
    for_pairs(places, 1,
              [&](const auto& from, const auto& to) { expect_right_numbers(mesh, from, to); });
}

TEST(HopsTest, MovesOverEveryAxisBringTheRightNumbers) {
  const Mesh mesh =
      Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}, {Axis::kSequence, 3}, {Axis::kTensor, 2}});
  for_pairs(every_layout(), 37,
            [&](const auto& from, const auto& to) { expect_right_numbers(mesh, from, to); });
}

}  // namespace
}  // namespace penstock
