// The fusions, one golden route each ([Note: Fusions]).
#include "src/plan/route.h"

#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::route_test {
namespace {

const Mesh kMesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});
constexpr int kRank = 3;

Placement at(const char* text) { return Placement::parse(text); }

// "local 1/2 SS@device:fp32 | all_gather RR@device:fp32"
std::string text(const Route& way) {
  static constexpr const char* kNames[] = {"local", "all_gather", "reduce_scatter", "all_reduce"};
  std::vector<std::string> parts;
  for (const Pass& pass : way.passes) {
    const std::string part = pass.parts > 1 ? concat(" ", pass.part, "/", pass.parts) : "";
    parts.push_back(concat(kNames[static_cast<size_t>(pass.kind)], part, " ", pass.to.text()));
  }
  return join(parts, " | ");
}

Route between(const char* from, const char* to, bool consumes = true) {
  return route(at(from), hops(at(from), at(to)), kMesh, kRank, consumes);
}

TEST(RouteTest, AGatherIsWrittenIntoByThePassBefore) {
  const Route way = between("SS@host:fp32", "RR@device:bf16");
  EXPECT_EQ(text(way), "local SS@device:bf16 | all_gather RR@device:bf16");
  EXPECT_TRUE(way.into_next(0));
  EXPECT_FALSE(way.local());
}

TEST(RouteTest, AGatherOfDeltasNeedsItsInputElsewhere) {
  const auto gathers = [](const char* wires) {
    Wires all = Wires::parse(wires, Rounding::kNearest);
    return route(at("SS@device:fp32"), hops(at("SS@device:fp32"), at("RR@device:bf16"), all), kMesh,
                 kRank, true);
  };
  const Route both = gathers("int4/128/delta");
  EXPECT_EQ(text(both), "local SS@device:bf16 | all_gather RR@device:bf16");
  EXPECT_FALSE(both.into_next(0));
  EXPECT_FALSE(both.joins_update());
  // The parameters of one node already have their old values where they are gathered.
  const Route nodes = gathers("node:int4/128/delta");
  EXPECT_EQ(text(nodes),
            "local SS@device:bf16 | all_gather RS@device:bf16 | all_gather RR@device:bf16");
  EXPECT_FALSE(nodes.into_next(0));
  EXPECT_TRUE(nodes.into_next(1));
}

TEST(RouteTest, SlicesCopiesAndCastsAreOnePass) {
  const Route way = between("RR@device:fp32", "RS@host:bf16");
  EXPECT_EQ(text(way), "local 1/2 RS@host:bf16");
  EXPECT_TRUE(way.local());
  EXPECT_EQ(text(between("RR@device:fp32", "SS@disk:fp32")), "local 3/4 SS@disk:fp32");
}

TEST(RouteTest, ASliceIsTheShardOfItsRank) {
  for (int rank = 0; rank < kMesh.world(); ++rank) {
    const Route cut = route(at("RR@device:fp32"), {parse_move("slice(node,local)")}, kMesh, rank);
    const int shard = shard_index(at("SS@device:fp32"), kMesh, rank);
    EXPECT_EQ(text(cut), concat("local ", shard, "/4 SS@device:fp32"));
  }
}

TEST(RouteTest, ASumIsWrittenWhereItEnds) {
  EXPECT_EQ(text(between("PP@device:bf16", "SS@host:fp32")), "reduce_scatter SS@host:fp32");
}

TEST(RouteTest, ASumInPlace) {
  EXPECT_TRUE(between("PP@device:fp32", "RR@device:fp32").in_place());
  // Not in place if the buffer is still read.
  const Route read = between("PP@device:fp32", "RR@device:fp32", false);
  EXPECT_EQ(text(read), "local PP@device:fp32 | all_reduce RR@device:fp32");
}

TEST(RouteTest, BetweenTwoSumsValuesAreWide) {
  const Route way = between("PP@device:bf16", "RS@device:bf16");
  EXPECT_EQ(text(way),
            "reduce_scatter PS@device:fp32 | all_reduce RS@device:fp32 | local RS@device:bf16");
  EXPECT_EQ(way.dtype_after(0, Dtype::kBf16, Dtype::kBf16), Dtype::kFp32);
  EXPECT_EQ(way.dtype_after(2, Dtype::kBf16, Dtype::kBf16), Dtype::kBf16);
  // A buffer may have its own dtype, and keeps this dtype unless a pass widens the values.
  EXPECT_EQ(between("PP@device:bf16", "SS@device:bf16").dtype_after(0, Dtype::kFp32, Dtype::kFp32),
            Dtype::kFp32);
  EXPECT_EQ(text(between("PP@device:bf16", "RS@host:fp32")),
            "reduce_scatter PS@device:fp32 | all_reduce RS@device:fp32 | local RS@host:fp32");
}

TEST(RouteTest, WhatIsSummedInPlaceIsWhereItEnds) {
  const Route way = between("PP@device:fp32", "RS@device:fp32");
  EXPECT_EQ(text(way), "reduce_scatter PS@device:fp32 | all_reduce RS@device:fp32");
  EXPECT_TRUE(way.ends_at(0));
  EXPECT_TRUE(way.ends_at(1));
  EXPECT_FALSE(between("PP@device:bf16", "RS@device:bf16").ends_at(0));
}

TEST(RouteTest, AnUpdateDoesTheFirstPassOfItsPublish) {
  EXPECT_TRUE(between("SS@host:fp32", "RR@device:bf16").joins_update());
  EXPECT_TRUE(between("SS@device:fp32", "SS@device:bf16").joins_update());
  // The update must write this rank's entire part of the resting copy or of its gather buffer.
  EXPECT_FALSE(between("RR@device:fp32", "SS@device:bf16").joins_update());
  EXPECT_FALSE(between("SS@host:fp32", "RR@host:bf16").joins_update());
  EXPECT_FALSE(between("SS@host:fp32", "SS@disk:bf16").joins_update());
}

TEST(RouteTest, OneMoveOnePassElse) {
  // If shards are numbered differently, a shard is made from the whole copy.
  EXPECT_EQ(text(between("SS@device:fp32", "SR@device:fp32")),
            "all_gather RR@device:fp32 | local 1/2 SR@device:fp32");
  EXPECT_THROW(route(at("RR@device:fp32"), {parse_move("all_gather(data)")}, kMesh, kRank),
               ConfigError);
}

}  // namespace
}  // namespace penstock::route_test
