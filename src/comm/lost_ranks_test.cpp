#include "src/comm/lost_ranks.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <thread>
#include <vector>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace penstock::comm {
namespace {

TEST(LostRanks, NamesTheRankThatDoesNotAnswerAndKeepsTheFirstVerdict) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto grace = std::chrono::milliseconds(400);
  std::vector<std::unique_ptr<LostRanks>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == 1) {
      ranks.push_back(nullptr);  // a rank that never starts
      continue;
    }
    ranks.push_back(std::make_unique<LostRanks>(store, "g", rank, 3, grace));
    ranks.back()->set_position(Position::of("step 5"));
  }
  const std::string verdict = ranks[0]->call("connection closed");
  EXPECT_NE(verdict.find("rank 1 is dead or stopped"), std::string::npos) << verdict;
  EXPECT_NE(verdict.find("rank 2 is at step 5"), std::string::npos) << verdict;
  EXPECT_NE(verdict.find("rank 0 failed at step 5: connection closed"), std::string::npos);
  EXPECT_EQ(ranks[2]->call("rank 0 left"), verdict);
}

// Returns the answer of each rank's last call; "!" and the error if it threw.
std::vector<std::string> last_calls(const std::vector<std::string>& faults, int world,
                                    std::vector<std::string>* ended) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<LostRanks>> ranks;
  for (size_t rank = 0; rank < faults.size(); ++rank) {
    ranks.push_back(std::make_unique<LostRanks>(
        store, "l", static_cast<int>(rank), world, std::chrono::milliseconds(200),
        LostRanks::Requests{[ended, rank](const std::string& why) { ended->at(rank) = why; }, {}}));
  }
  std::vector<std::string> answers(faults.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < faults.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        answers[rank] = ranks[rank]->last_call(faults[rank], std::chrono::seconds(3));
      } catch (const std::exception& error) {
        answers[rank] = std::string("!") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ranks.clear();  // joins the watch threads, which write to `ended`
  return answers;
}

TEST(LostRanks, TheLastCallTellsEveryRankOfTheFirstFault) {
  std::vector<std::string> ended(3);
  EXPECT_EQ(last_calls({"", "", ""}, 3, &ended), (std::vector<std::string>{"", "", ""}));
  const std::vector<std::string> all(3, "rank 1: no data");
  EXPECT_EQ(last_calls({"", "no data", ""}, 3, &ended), all);
  EXPECT_EQ(ended, std::vector<std::string>(3));  // all ranks called at about the same time
}

TEST(LostRanks, ARankThatFailedEndsTheWaitsOfThoseThatDoNotCome) {
  std::vector<std::string> ended(3);
  for (const std::string& answer : last_calls({"", "no data", ""}, 4, &ended)) {
    EXPECT_EQ(answer.front(), '!') << answer;
    EXPECT_NE(answer.find("rank 3 is dead or stopped"), std::string::npos) << answer;
  }
}

TEST(LostRanks, EndsWithoutAFault) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const LostRanks alone(store, "h", 0, 1, std::chrono::milliseconds(100));
}

}  // namespace
}  // namespace penstock::comm
