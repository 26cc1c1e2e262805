// Routes: which passes a list of moves becomes, and what they read and write.
#include "src/plan/route.h"

#include <gtest/gtest.h>

#include <string>

#include "src/base/text.h"

namespace penstock {
namespace {

const Mesh kMesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 3}});

Route route_of(const char* from, const std::string& text, int rank = 0, bool consumes = true) {
  std::vector<Move> moves;
  for (const std::string& one : split(text, ';')) moves.push_back(parse_move(one));
  return route(Placement::parse(from), moves, kMesh, rank, consumes);
}

// As "slice 5/6 SS@device:fp32": each pass with its part and where it ends.
std::string text_of(const Route& route) {
  constexpr const char* kNames[] = {"local", "all_gather", "reduce_scatter", "all_reduce"};
  std::string text;
  for (const Pass& pass : route.passes) {
    text += concat(text.empty() ? "" : "; ", kNames[static_cast<size_t>(pass.kind)]);
    if (pass.parts > 1) text += concat(" ", pass.part, "/", pass.parts);
    text += concat(" ", pass.to.text());
  }
  return text;
}

TEST(Route, ASliceIsTheShardOfItsRank) {
  for (int rank = 0; rank < kMesh.world(); ++rank) {
    const Route cut = route_of("RR@device:fp32", "slice(node,local)", rank);
    const int shard = shard_index(Placement::parse("SS@device:fp32"), kMesh, rank);
    EXPECT_EQ(text_of(cut), concat("local ", shard, "/6 SS@device:fp32"));
  }
  EXPECT_EQ(text_of(route_of("RR@device:fp32", "slice(local)", 5)), "local 2/3 RS@device:fp32");
}

TEST(Route, NeighboursAreOnePass) {
  EXPECT_EQ(
      text_of(route_of("RR@device:fp32", "cast(bf16); slice(node,local); copy(device,host)", 4)),
      "local 4/6 SS@host:bf16");
  EXPECT_EQ(text_of(route_of("PP@device:bf16", "reduce_scatter(node,local); copy(device,host)")),
            "reduce_scatter SS@host:bf16");
  EXPECT_EQ(text_of(route_of("PR@device:bf16", "reduce_scatter(node); slice(local)")),
            "reduce_scatter SR@device:bf16; local 0/3 SS@device:bf16");
  const Route publish = route_of("SS@host:fp32", "cast(bf16); copy(host,device); all_gather(data)");
  EXPECT_EQ(text_of(publish), "local SS@device:bf16; all_gather RR@device:bf16");
  EXPECT_TRUE(publish.into_next(0));
  EXPECT_TRUE(publish.joins_update());
}

TEST(Route, WhatIsBetweenTwoSumsIsWide) {
  const Route sums = route_of("PP@device:bf16", "reduce_scatter(local); all_reduce(node)");
  EXPECT_EQ(text_of(sums),
            "reduce_scatter PS@device:fp32; all_reduce RS@device:fp32; local RS@device:bf16");
  EXPECT_EQ(sums.dtype_after(0, Dtype::kBf16, Dtype::kBf16), Dtype::kFp32);
  EXPECT_EQ(sums.dtype_after(1, Dtype::kBf16, Dtype::kBf16), Dtype::kFp32);
  EXPECT_EQ(sums.dtype_after(2, Dtype::kBf16, Dtype::kBf16), Dtype::kBf16);
  // A buffer in a dtype of its own: where values do not widen, they keep it.
  const Route one = route_of("PP@device:bf16", "reduce_scatter(node,local)");
  EXPECT_EQ(one.dtype_after(0, Dtype::kFp32, Dtype::kFp32), Dtype::kFp32);
}

TEST(Route, ASumInPlaceConsumesItsSource) {
  EXPECT_TRUE(route_of("PP@device:fp32", "all_reduce(data)").in_place());
  EXPECT_FALSE(route_of("PP@device:fp32", "reduce_scatter(data)").in_place());
  EXPECT_EQ(text_of(route_of("PP@device:fp32", "all_reduce(data)", 0, /*consumes=*/false)),
            "local PP@device:fp32; all_reduce RR@device:fp32");
}

}  // namespace
}  // namespace penstock
