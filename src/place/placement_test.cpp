#include "src/place/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
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
        for (const Dtype dtype : dtypes) places.push_back({{node, local}, tier, dtype});
  return places;
}

TEST(PlacementTest, TextParses) {
  for (const Placement& place : every_placement({Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}))
    EXPECT_EQ(Placement::parse(place.text()), place);
  EXPECT_EQ(Placement::parse("SR@host:bf16").on(Axis::kNode), Layout::kSharded);
  for (const char* wrong : {"", "SR", "SRR@host:bf16", "SX@host:bf16", "SR@hots:bf16",
                            "SR@host:fp64", "SR@host", "S:R@host"})
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
  for (const char* text :
       {"all_gather(data)", "all_gather(local)", "reduce_scatter(node)", "all_reduce(tensor)",
        "slice(local)", "copy(device,host)", "copy(disk,host)", "cast(bf16)"})
    EXPECT_EQ(parse_move(text).text(), text);
  for (const char* wrong : {"", "gather(data)", "all_gather", "all_gather(", "all_gather(dat)",
                            "copy(host)", "copy(host,)", "cast()"})
    EXPECT_THROW(parse_move(wrong), ConfigError) << wrong;
}

TEST(PlacementTest, ShardsNestWithNodeOutermost) {
  const Mesh mesh{2, 3, 2};
  const int rank = (1 * 3 + 2) * 2 + 1;  // node 1, local 2, tensor 1
  const auto shard = [&](const char* text) {
    const Placement place = Placement::parse(text);
    return std::pair(shard_index(place, mesh, rank), num_shards(place, mesh));
  };
  EXPECT_EQ(shard("SS@device:fp32"), std::pair(5, 6));
  EXPECT_EQ(shard("SR@device:fp32"), std::pair(1, 2));
  EXPECT_EQ(shard("RS@device:fp32"), std::pair(2, 3));
  EXPECT_EQ(shard("RP@device:fp32"), std::pair(0, 1));
}

TEST(PlacementTest, OneDataRankHoldsEverything) {
  const Placement place = Placement::parse("SP@host:bf16");
  EXPECT_EQ(normalize(place, {1, 1, 4}).text(), "RR@host:bf16");
  EXPECT_EQ(normalize(place, {1, 2, 1}), place);
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
  };
  for (const HopsCase& c : cases) EXPECT_EQ(hops_text(c.from, c.to), c.moves) << c.from;
}

TEST(HopsTest, WhatCannotMoveIsAnError) {
  for (const auto& [from, to] : {std::pair("RR", "PP"),
                                 {"SS", "PP"},
                                 {"RR", "RP"},
                                 {"SS", "RS"},
                                 {"RS", "SS"},
                                 {"PS", "SS"}})
    EXPECT_THROW(hops_text(concat(from, "@device:fp32"), concat(to, "@device:fp32")), ConfigError)
        << from << " to " << to;
  EXPECT_THROW(apply(Placement::parse("SS@host:fp32"), parse_move("all_gather(data)")),
               ConfigError);
  EXPECT_THROW(apply(Placement::parse("SS@device:fp32"), parse_move("all_gather(tensor)")),
               ConfigError);
}

// All ranks' copies of one range of numbers, in one thread.
class World {
 public:
  World(const Mesh& mesh, const Placement& place) : mesh_(mesh), place_(place) {
    const int num_shards = penstock::num_shards(place, mesh);
    double share = 1;  // what each rank of a partial sum has of every number
    for (const Axis axis : {Axis::kNode, Axis::kLocal})
      if (place.on(axis) == Layout::kPartial) share /= mesh.size(axis);
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

TEST(HopsTest, EveryPairMovesTheRightNumbersOrThrows) {
  int num_moved = 0;
  const auto places = every_placement({Dtype::kFp32, Dtype::kBf16});
  for (const Mesh& mesh : {Mesh{2, 3, 1}, Mesh{1, 4, 1}, Mesh{4, 1, 2}}) {
    for (const Placement& from : places) {
      for (const Placement& to : places) {
        std::vector<Move> moves;
        try {
          moves = hops(from, to);
        } catch (const ConfigError&) {
          continue;
        }
        World world(mesh, from);
        for (const Move& move : moves) world.apply(move);
        const World wanted(mesh, to);
        for (int rank = 0; rank < mesh.world(); ++rank) {
          const auto& mine = world.copies()[rank];
          const auto& expected = wanted.copies()[rank];
          ASSERT_EQ(mine.size(), expected.size()) << from.text() << " to " << to.text();
          for (size_t i = 0; i < mine.size(); ++i)
            ASSERT_NEAR(mine[i], expected[i], 1e-12) << from.text() << " to " << to.text();
        }
        ++num_moved;
      }
    }
  }
  EXPECT_GT(num_moved, 2000);
}

}  // namespace
}  // namespace penstock
