#include "src/base/turns.h"

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <vector>

namespace penstock {
namespace {

// The ranks' turns, one letter per turn: F forward, B backward, S step. A lower-case letter is a
// turn that ended in an error. The letter e is a forward whose error came after its collectives.
Standing standing(int rank, const std::string& letters) {
  TurnLog turns;
  for (const char letter : letters) {
    const std::string one(1, letter == 'e' ? 'F' : static_cast<char>(std::toupper(letter)));
    turns.begin({one == "B" ? "backward" : one, "did " + one, "", false});
    if (std::islower(letter) != 0) turns.raised("left " + one, letter != 'e');
  }
  return turns.standing(rank);
}

struct Case {
  std::string asks, own;  // turns
  std::string expected;   // a part of the difference; "": none
};

TEST(Turns, FindDifferentCalls) {
  RankStatus idle;
  idle.lanes.push_back({"gather", false, -1, 3, 7, {}});
  for (const Case& one : std::vector<Case>{
           {"FB", "FB", ""},
           {"FBF", "FB", ""},
           {"FB", "FBF", ""},
           {"FBF", "FBS", "rank 1 did F, but rank 0 did S"},
           {"FBFB", "FBS", "rank 1 did F, but rank 0 did S"},
           {"FBS", "FBF", "rank 1 did S, but rank 0 did F"},
           {"FBF", "FBf", "rank 0 left F; rank 1 raised no error"},
           {"FBFB", "FBf", "rank 0 left F; rank 1 raised no error"},
           {"FBF", "FBfF", "rank 0 left F; rank 1 raised no error"},
           {"FBFB", "FBfF", "rank 1 did B, but rank 0 did F; before that, rank 0 left F"},
           {"FBf", "FBf", ""},
           {"FBfF", "FBf", ""},  // rank 1 caught the same error and continued
           {"FBf", "FB", ""},
           {"FBF", "FBe", ""},
           {"FBFF", "FBe", ""},
           {"FBFB", "FBe", "rank 0 left F; rank 1 raised no error"},
           {std::string(40, 'F') + "B", std::string(40, 'F') + "S", "did B, but"},
           {std::string(40, 'F') + "B", "F", ""},
       }) {
    const Standing asks = standing(1, one.asks);
    const std::string found = difference(Standing::parse(asks.text()), standing(0, one.own), idle);
    EXPECT_EQ(found.empty(), one.expected.empty()) << one.asks << " " << one.own << ": " << found;
    EXPECT_NE(found.find(one.expected), std::string::npos) << one.asks << " " << one.own << found;
    EXPECT_EQ(is_difference(found), !found.empty());
  }
}

TEST(Turns, FindDifferentCollectivesOfALane) {
  Standing asks = standing(1, "F");
  asks.lane = "gather";
  asks.sequence = 3;
  asks.tag = 7;
  asks.collective = "move u1";
  const auto found = [&](const std::string& lane, bool waits, int64_t sequence, uint32_t tag) {
    RankStatus status;
    status.lanes.push_back({lane, waits, -1, sequence, tag, {0, 0.0, "move u2"}});
    return difference(Standing::parse(asks.text()), standing(0, "F"), status);
  };
  EXPECT_NE(found("gather", true, 3, 8).find("`move u1`, but rank 0 is in `move u2`"),
            std::string::npos);
  EXPECT_EQ(found("gather", true, 3, 7), "");
  EXPECT_EQ(found("gather", true, 2, 8), "");
  EXPECT_EQ(found("gather", false, 3, 8), "");
  EXPECT_EQ(found("reduce", true, 3, 8), "");
  asks.lane = "receive, f";  // messages between stages
  EXPECT_EQ(found("receive, f", true, 3, 8), "");
}

}  // namespace
}  // namespace penstock
