#include "src/plan/copies.h"

#include <gtest/gtest.h>

#include "penstock/error.h"

namespace penstock::copies_test {
namespace {

Placement at(const char* text) { return Placement::parse(text); }
std::vector<Move> moves(const std::vector<const char*>& texts) {
  std::vector<Move> list;
  for (const char* text : texts) list.push_back(parse_move(text));
  return list;
}
std::string text(const std::vector<Move>& list) {
  std::string all;
  for (const Move& move : list) all += move.text() + ";";
  return all;
}

TEST(CopiesTest, WhatRestsStaysAndGoesBackForFree) {
  Copies book = Copies::resting(at("SS@host:bf16"));
  book.move(moves({"copy(host,device)", "all_gather(data)"}));
  EXPECT_EQ(book.current(), at("RR@device:bf16"));
  EXPECT_TRUE(book.has(at("SS@host:bf16")));
  // A working copy replaces the previous one.
  book.move(moves({"slice(local)"}));
  EXPECT_EQ(book.current(), at("RS@device:bf16"));
  EXPECT_FALSE(book.has(at("RR@device:bf16")));
  book.drop();
  EXPECT_TRUE(book.at_rest());
  EXPECT_EQ(book.current(), at("SS@host:bf16"));
}

TEST(CopiesTest, WhatMovesLeavesItsPlaceAndIsAddedToWhatIsThere) {
  Copies book = Copies::moving();
  book.make(at("PP@device:bf16"));
  book.move(moves({"reduce_scatter(data)"}));
  EXPECT_EQ(book.places(), std::vector<Placement>{at("SS@device:bf16")});
  book.make(at("PP@device:bf16"));  // made by the next backward
  book.make(at("PP@device:bf16"));
  EXPECT_EQ(book.places().size(), 2U);
  book.move(moves({"reduce_scatter(data)"}));
  EXPECT_EQ(book.places(), std::vector<Placement>{at("SS@device:bf16")});
  EXPECT_THROW(book.drop(), Bug);
  book.clear();
  EXPECT_TRUE(book.empty());
}

TEST(CopiesTest, AWriteLeavesOneCopy) {
  Copies book = Copies::resting(at("RR@device:fp32"));
  book.move(moves({"cast(bf16)"}));
  book.write(at("RR@device:fp32"));
  EXPECT_TRUE(book.at_rest());
  EXPECT_FALSE(book.has(at("RR@device:bf16")));
}

TEST(CopiesTest, MovesStartFromTheLastCopyThatFitsThem) {
  Copies book = Copies::resting(at("SS@device:bf16"));
  book.make(at("RS@device:bf16"));
  EXPECT_EQ(book.source(moves({"all_gather(local)"})), at("RS@device:bf16"));
  EXPECT_EQ(book.source(moves({"all_gather(data)"})), at("SS@device:bf16"));
  EXPECT_EQ(book.source(moves({"copy(host,device)"})), std::nullopt);
  EXPECT_THROW(book.move(moves({"copy(host,device)"})), Bug);
  EXPECT_THROW(book.move(moves({"slice(local)"}), at("RR@device:bf16")), Bug);
}

TEST(CopiesTest, TheWayIsTheShortestAndThatAtHandFirst) {
  Copies book = Copies::resting(at("SS@disk:bf16"));
  book.make(at("RR@device:bf16"));
  // One copy from disk would be shorter, but it needs the disk.
  EXPECT_EQ(text(book.way_to(at("SS@host:bf16"))), "slice(data);copy(device,host);");
  book = Copies::resting(at("SS@device:bf16"));
  book.make(at("SS@disk:bf16"));
  EXPECT_EQ(text(book.way_to(at("RR@device:bf16"))), "all_gather(data);");
  EXPECT_EQ(text(book.way_to(at("SS@disk:bf16"))), "");
  book = Copies::resting(at("SS@device:bf16"));
  book.make(at("RS@device:bf16"));
  EXPECT_EQ(text(book.way_to(at("RR@device:bf16"))), "all_gather(local);");
}

}  // namespace
}  // namespace penstock::copies_test
