// The book of copies: which copy a move starts from, and which are gone after it.
#include "src/plan/copies.h"

#include <gtest/gtest.h>

#include <string>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {
namespace {

Placement at(const char* text) { return Placement::parse(text); }

std::vector<Move> moves(const std::string& text) {
  std::vector<Move> parsed;
  for (const std::string& one : split(text, ';')) parsed.push_back(parse_move(one));
  return parsed;
}

std::string text_of(const Copies& book) {
  std::string text;
  for (const Placement& place : book.places()) text += concat(" ", place.text());
  return text;
}

constexpr const char* kRests = "SS@device:bf16";
constexpr const char* kHeld = "RS@device:bf16";
constexpr const char* kWhole = "RR@device:bf16";

// As hpz: gathered, then held inside the node.
Copies held_in_node() {
  Copies book = Copies::resting(at(kRests));
  book.move(moves("all_gather(node,local)"));
  book.move(moves("slice(local)"));
  return book;
}

TEST(Copies, AMoveTakesThePlaceOfTheWorkingCopy) {
  Copies book = Copies::resting(at(kRests));
  EXPECT_TRUE(book.at_rest());
  book.move(moves("all_gather(node,local)"));
  EXPECT_EQ(text_of(book), " RR@device:bf16 SS@device:bf16");
  book.move(moves("slice(local)"));
  EXPECT_EQ(text_of(book), " RS@device:bf16 SS@device:bf16");
  EXPECT_EQ(book.current(), at(kHeld));
  EXPECT_FALSE(book.has(at(kWhole)));
}

TEST(Copies, AMoveStartsFromTheLastCopyThatItApplies) {
  const Copies book = held_in_node();
  EXPECT_EQ(book.source(moves("all_gather(local)")), at(kHeld));
  EXPECT_EQ(book.source(moves("all_gather(node,local)")), at(kRests));
  EXPECT_EQ(book.source(moves("copy(disk,host)")), std::nullopt);
  Copies gone = book;
  EXPECT_THROW(gone.move(moves("copy(disk,host)")), Bug);
  EXPECT_THROW(gone.move(moves("slice(local)"), at(kWhole)), Bug);
}

TEST(Copies, TheWayStartsFromTheWorkingCopy) {
  EXPECT_EQ(held_in_node().way_to(at(kWhole)), moves("all_gather(local)"));
  EXPECT_EQ(Copies::resting(at(kRests)).way_to(at(kWhole)), moves("all_gather(node,local)"));
  EXPECT_TRUE(held_in_node().way_to(at(kRests)).empty());
}

TEST(Copies, DropLeavesTheAuthorityAndAWriteNothingElse) {
  Copies dropped = held_in_node();
  dropped.drop();
  EXPECT_EQ(text_of(dropped), " SS@device:bf16");
  Copies written = held_in_node();
  written.write(at(kHeld));
  EXPECT_EQ(text_of(written), " RS@device:bf16");
}

TEST(Copies, WhatMovesLeavesNothingBehind) {
  Copies book = Copies::moving({at("PP@device:bf16")});
  book.move(moves("reduce_scatter(node,local)"));
  EXPECT_EQ(text_of(book), " SS@device:bf16");
  book.make(at("PP@device:bf16"));  // the next backward's
  book.make(at("PP@device:bf16"));
  EXPECT_EQ(text_of(book), " PP@device:bf16 SS@device:bf16");
  book.move(moves("reduce_scatter(node,local)"));
  EXPECT_EQ(text_of(book), " SS@device:bf16");
  EXPECT_THROW(book.drop(), Bug);
}

}  // namespace
}  // namespace penstock
