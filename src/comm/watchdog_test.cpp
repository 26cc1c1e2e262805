#include "src/comm/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "penstock/error.h"
#include "src/comm/channel.h"

namespace penstock::comm {
namespace {

using std::chrono::milliseconds;

TEST(Watchdog, SaysOnceWhichWaitIsLong) {
  std::promise<std::string> said;
  std::atomic<int> lines = 0;
  {
    WatchOptions options;
    options.warn = milliseconds(20);
    Watchdog watch(1, 2, options, [&](const std::string& line) {
      if (++lines == 1) said.set_value(line);
    });
    const int gather = watch.board().lane("gather"), reduce = watch.board().lane("reduce");
    const Waiting short_wait(&watch.board(), -1, {7, 1, 5}, "nothing");
    const Waiting waiting(&watch.board(), gather, {7, 12, 99}, "move u3 param (h.2)");
    watch.board().waits_for(99, 0);
    const std::string line = said.get_future().get();
    EXPECT_EQ(
        line.rfind("penstock: rank 1, step 7: waiting 0 s for rank 0 in `move u3 param (h.2)`; "
                   "`penstock status ",
                   0),
        0U)
        << line;
    // The wait of the reduce lane prints a second line. By then the first lane has been checked
    // again.
    const Waiting other(&watch.board(), reduce, {7, 3, 98}, "move u1 grad");
    while (lines < 2) std::this_thread::yield();
  }
  EXPECT_EQ(lines, 2);
}

Members pair(const Group& group) { return {{0, 1}, group.rank()}; }

TEST(Watchdog, ChannelsWaitOnTheBoardAndErrorsShowThePlansLastLines) {
  WatchOptions quiet;
  quiet.warn = milliseconds(0);
  const auto groups = Group::threads(2, milliseconds(3000), quiet);
  groups[0]->board()->log("forward u1 (h.0)", true);
  Channel channel(*groups[0], "gather");
  channel.set_step(3);
  std::vector<float> full(2);
  std::string error;
  std::thread waiter([&] {
    try {
      channel.all_gather("move u1 param", pair(*groups[0]), {{full.data(), 4}});
    } catch (const RuntimeFault& fault) {
      error = fault.what();
    }
  });
  RankStatus::Lane lane;
  while (!lane.waits || lane.peer < 0) lane = groups[0]->board()->status().lanes.front();
  EXPECT_EQ(lane.name, "gather");
  EXPECT_EQ(lane.peer, 1);
  EXPECT_EQ(lane.line.step, 3);
  EXPECT_EQ(lane.line.text, "move u1 param");
  waiter.join();
  EXPECT_NE(error.find("last lines on rank 0: `forward u1 (h.0)`"), std::string::npos) << error;
  EXPECT_FALSE(groups[0]->board()->status().lanes.front().waits);
  groups[0]->close();
  EXPECT_EQ(groups[0]->board(), nullptr);
}

}  // namespace
}  // namespace penstock::comm
