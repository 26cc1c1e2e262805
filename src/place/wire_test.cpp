#include "src/place/wire.h"

#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/place/placement.h"

namespace penstock {
namespace {

TEST(WireTest, TextParses) {
  for (const char* text : {"plain", "int8/128", "int4/32", "int8/64/stochastic", "sign/64",
                           "fp8/32", "int4/128/delta", "int4/64/stochastic/delta"}) {
    EXPECT_EQ(Wire::parse(text).text(), text);
  }
  EXPECT_EQ(Wire::parse("int8").text(), "int8/128");
  EXPECT_EQ(Wire::parse("int4/stochastic").text(), "int4/128/stochastic");
  EXPECT_EQ(Wire::parse("int8", Rounding::kStochastic).text(), "int8/128/stochastic");
  EXPECT_EQ(Wire::parse("sign", Rounding::kStochastic).text(Rounding::kStochastic), "sign/128");
  EXPECT_EQ(Wire::parse("fp8", Rounding::kStochastic).text(Rounding::kStochastic), "fp8/128");
  const Wire nearest = Wire::parse("int8/nearest", Rounding::kStochastic);
  EXPECT_EQ(nearest.text(), "int8/128");
  EXPECT_EQ(nearest.text(Rounding::kStochastic), "int8/128/nearest");
}

TEST(WireTest, RefusesOtherTexts) {
  for (const char* text : {"", "int9", "int8/", "int8/100", "int8/0128", "int8/128/up", "plain/128",
                           "int8/nearest/128", "int8/128/nearest/", "plain/nearest", "sign/nearest",
                           "sign/128/stochastic", "fp8/stochastic", "fp8/nearest", "plain/delta",
                           "int8/delta/128", "delta"}) {
    EXPECT_THROW(Wire::parse(text), ConfigError) << text;
  }
  for (const char* text :
       {"node:int8,node:int4", "tensor:int8", "node:", "int8,int4", "node:int8,"}) {
    EXPECT_THROW(Wires::parse(text, Rounding::kNearest), ConfigError) << text;
  }
}

TEST(WireTest, CountsBytes) {
  const Wire int8 = Wire::parse("int8/128"), int4 = Wire::parse("int4/128");
  EXPECT_EQ(int8.encoded_bytes(128), 144);  // 4 + 128, a multiple of 16
  EXPECT_EQ(int8.encoded_bytes(1 << 20), (1 << 20) + (1 << 15));
  EXPECT_EQ(int4.encoded_bytes(1 << 20), (1 << 19) + (1 << 15));
  EXPECT_EQ(int4.encoded_bytes(3), 16);
  EXPECT_EQ(Wire::parse("fp8/128").encoded_bytes(1 << 20), (1 << 20) + (1 << 15));
  EXPECT_EQ(Wire::parse("sign/128").encoded_bytes(1 << 20), (1 << 17) + (1 << 15));
}

TEST(WireTest, AnAxisOfOneRankTakesTheOtherAxis) {
  const Wires wires = Wires::parse("node:int4/128", Rounding::kNearest);
  EXPECT_EQ(wires.text(Rounding::kNearest), "node:int4/128");
  const Mesh nodes = Mesh::of({{Axis::kNode, 4}});
  const Mesh one_node = Mesh::of({{Axis::kLocal, 4}});
  const Mesh both = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});
  EXPECT_EQ(wires.on(nodes).text(Rounding::kNearest), "int4/128");
  EXPECT_EQ(wires.on(one_node).text(Rounding::kNearest), "plain");
  EXPECT_EQ(wires.on(both), wires);
}

std::string text_of(const std::vector<Move>& moves) {
  std::string text;
  for (const Move& move : moves) {
    EXPECT_EQ(parse_move(move.text()), move);
    text += move.text() + ";";
  }
  return text;
}

TEST(WireTest, CollectivesWithDifferentWiresAreNotJoined) {
  const Placement shards = Placement::parse("SS@device:bf16"),
                  whole = Placement::parse("RR@device:bf16");
  const Placement addends = Placement::parse("PP@device:bf16");
  const auto wires = [](const char* text) { return Wires::parse(text, Rounding::kNearest); };
  EXPECT_EQ(text_of(hops(shards, whole, wires("int8"))), "all_gather(data:int8/128);");
  EXPECT_EQ(text_of(hops(shards, whole, wires("node:int8"))),
            "all_gather(node:int8/128);all_gather(local);");
  EXPECT_EQ(text_of(hops(addends, shards, wires("node:int4,local:int8"))),
            "reduce_scatter(local:int8/128);reduce_scatter(node:int4/128);");
  EXPECT_EQ(text_of(hops(whole, shards, wires("int8"))), "slice(data);");
  EXPECT_THROW(parse_move("slice(data:int8)"), ConfigError);
}

}  // namespace
}  // namespace penstock
