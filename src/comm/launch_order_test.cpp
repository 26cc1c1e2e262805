#include "src/comm/launch_order.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace penstock::comm {
namespace {

using namespace std::chrono_literals;

TEST(LaunchOrder, LanesLaunchInTheOrderOfTheTurns) {
  LaunchOrder order(c10::Device(c10::kCPU));
  std::vector<int> launched;  // only the thread whose turn it is writes it
  for (int round = 0; round < 200; ++round) {
    launched.clear();
    std::vector<std::shared_ptr<LaunchTurn>> turns;
    for (int line = 0; line < 6; ++line) turns.push_back(order.next());
    const auto lane = [&](int first) {
      for (int line = first; line < 6; line += 2) {
        turns[line]->wait();
        launched.push_back(line);
        turns[line]->leave();
      }
    };
    std::thread odd([&] { lane(1); });
    lane(0);
    odd.join();
    EXPECT_EQ(launched, (std::vector<int>{0, 1, 2, 3, 4, 5}));
  }
}

TEST(LaunchOrder, ALineThatNeverRunsBlocksNobody) {
  LaunchOrder order(c10::Device(c10::kCPU));
  auto dropped = order.next();
  const auto later = order.next();
  std::atomic<bool> launched = false;
  std::thread lane([&] {
    later->wait();
    launched = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(launched);
  dropped.reset();
  lane.join();
  EXPECT_TRUE(launched);
  later->leave();
  later->leave();  // a second time does nothing
  order.next()->wait();
}

TEST(LaunchOrder, EnginesOnADeviceShareItsTurns) {
  const c10::Device device(c10::kCUDA, 1);
  LaunchOrder one(device), other(device), elsewhere(c10::Device(c10::kCUDA, 0));
  const auto first = one.next();
  const auto second = other.next();
  elsewhere.next()->wait();
  std::atomic<bool> launched = false;
  std::thread lane([&] {
    second->wait();
    launched = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(launched);
  first->leave();
  lane.join();
  EXPECT_TRUE(launched);
}

}  // namespace
}  // namespace penstock::comm
