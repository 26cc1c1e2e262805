#include "src/comm/roll_call.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace penstock::comm {
namespace {

TEST(RollCall, NamesTheRankThatDoesNotAnswerAndKeepsTheFirstVerdict) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto grace = std::chrono::milliseconds(400);
  std::vector<std::unique_ptr<RollCall>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == 1) {
      ranks.push_back(nullptr);  // never there
      continue;
    }
    ranks.push_back(std::make_unique<RollCall>(store, "g", rank, 3, grace));
    ranks.back()->set_position(Position::of("step 5"));
  }
  const std::string verdict = ranks[0]->call("connection closed");
  EXPECT_NE(verdict.find("rank 1 is dead or stopped"), std::string::npos) << verdict;
  EXPECT_NE(verdict.find("rank 2 is at step 5"), std::string::npos) << verdict;
  EXPECT_NE(verdict.find("rank 0 failed at step 5: connection closed"), std::string::npos);
  EXPECT_EQ(ranks[2]->call("rank 0 left"), verdict);
}

TEST(RollCall, EndsWithoutAFault) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const RollCall alone(store, "h", 0, 1, std::chrono::milliseconds(100));
}

}  // namespace
}  // namespace penstock::comm
