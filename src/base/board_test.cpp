#include "src/base/board.h"

#include <fcntl.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {
namespace {

namespace fs = std::filesystem;

// Boards as another process finds them.
std::vector<std::string> boards_of_this_process() {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // only for the iterator
    const std::string target = fs::read_symlink(entry.path(), gone).string();
    if (target.starts_with(concat("/memfd:", kStatusFile))) paths.push_back(entry.path().string());
  }
  return paths;
}

TEST(Board, AnotherProcessReadsWhatWasWritten) {
  EXPECT_TRUE(boards_of_this_process().empty());
  {
    Board board(2, 4);
    const int gather = board.lane("gather"), reduce = board.lane("reduce");
    EXPECT_EQ(board.lane("gather"), gather);
    board.set_step(7);
    board.log("forward u1 (h.0)", true);
    board.log("move u2 param all_gather(local) (h.1)", false);
    board.wait_begins(gather, {7, 12, 99}, "move u2 param");
    board.wait_begins(reduce, {7, 3, 98}, "move u1 grad");
    board.waits_for(99, 3);
    board.wait_ends(reduce);
    board.meet(5, "a 10\nb 11\na 12\na 13");

    ASSERT_EQ(boards_of_this_process().size(), 1U);
    const std::optional<RankStatus> status = RankStatus::read(boards_of_this_process().front());
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->rank, 2);
    EXPECT_EQ(status->size, 4);
    EXPECT_EQ(status->pid, getpid());
    EXPECT_EQ(status->run, 5U);
    EXPECT_EQ(status->roster, (std::vector<std::string>{"a 10", "b 11", "a 12", "a 13"}));
    EXPECT_EQ(status->at.text, "forward u1 (h.0)");
    EXPECT_EQ(status->at.step, 7);
    EXPECT_GE(status->at.age_s, 0.0);
    ASSERT_EQ(status->log.size(), 2U);
    EXPECT_EQ(status->log[1].text, "move u2 param all_gather(local) (h.1)");
    ASSERT_EQ(status->lanes.size(), 2U);
    EXPECT_EQ(status->lanes[0].name, "gather");
    EXPECT_TRUE(status->lanes[0].waits);
    EXPECT_EQ(status->lanes[0].peer, 3);
    EXPECT_EQ(status->lanes[0].sequence, 12);
    EXPECT_EQ(status->lanes[0].line.text, "move u2 param");
    EXPECT_FALSE(status->lanes[1].waits);
  }
  EXPECT_TRUE(boards_of_this_process().empty());  // the file is gone with the board
}

TEST(Board, KeepsTheLastLinesAndTheBeginningOfLongOnes) {
  Board board(0, 1);
  for (int i = 0; i < 3 * kBoardLines + 7; ++i) board.log(concat("line ", i), false);
  const RankStatus status = board.status();
  ASSERT_EQ(status.log.size(), static_cast<size_t>(kBoardLines));
  EXPECT_EQ(status.log.front().text, concat("line ", 2 * kBoardLines + 7));
  EXPECT_EQ(status.log.back().text, concat("line ", 3 * kBoardLines + 6));
  EXPECT_EQ(status.at.text, "initialize");
  board.at(std::string(3000, 'x'));
  EXPECT_EQ(board.status().at.text, std::string(kBoardText, 'x') + "...");
}

TEST(Board, MoreLanesThanItHasRoomForDoNotShow) {
  Board board(0, 2);
  for (int i = 0; i < kBoardLanes; ++i) EXPECT_EQ(board.lane(concat("lane", i)), i);
  const int other = board.lane("other");
  EXPECT_EQ(other, -1);
  const Waiting waiting(&board, other, {}, "nothing");
  const Waiting nowhere(nullptr, 0, {}, "no board");
  for (const RankStatus::Lane& lane : board.status().lanes) EXPECT_FALSE(lane.waits);
}

TEST(Board, IsWholeWhileItIsWritten) {
  Board board(0, 2);
  std::atomic<bool> ends = false;
  std::thread writer([&] {
    for (char c = 'a'; !ends; c = c == 'z' ? 'a' : static_cast<char>(c + 1)) {
      board.at(std::string(c % 2 == 0 ? 100 : 50, c));
    }
  });
  while (board.status().at.text == "initialize") std::this_thread::yield();
  for (int i = 0; i < 20000; ++i) {
    const std::string text = board.status().at.text;
    EXPECT_EQ(text, std::string(text.size(), text.front()));  // or "?"
  }
  ends = true;
  writer.join();
}

TEST(Board, OtherFilesHaveNoStatus) {
  EXPECT_FALSE(RankStatus::read("/dev/null").has_value());
  EXPECT_THROW(RankStatus::read("/no/such/file"), RuntimeFault);
}

TEST(Board, ReportsTheLastLinesAndAllOfThemInAFile) {
  const std::string folder = testing::TempDir();
  Board board(3, 4, folder);
  EXPECT_EQ(board.report("an error"), "");  // no lines before the first one
  for (int i = 0; i < 300; ++i) board.log(concat("line ", i), false);
  const std::string says = board.report("an error");
  EXPECT_NE(says.find("on rank 3: `line 295`, `line 296`"), std::string::npos) << says;
  EXPECT_EQ(says.find("line 294"), std::string::npos) << says;
  const std::string path = says.substr(says.rfind(' ') + 1);
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(text.rfind("an error\nstep 0, ", 0), 0U) << text;
  EXPECT_NE(text.find("before: line 100\n"), std::string::npos);
  fs::remove(path);

  Board nowhere(3, 4, "/no/such/folder");
  nowhere.log("line", false);
  EXPECT_NE(nowhere.report("an error").find("no report could be written to /no/such/folder/"),
            std::string::npos);
}

}  // namespace
}  // namespace penstock
