#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "penstock/error.h"
#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/comm/shm/one_host.h"
#include "src/comm/shm/rendezvous.h"

namespace penstock::comm::group_test {
namespace {

using Groups = std::vector<std::shared_ptr<Group>>;

// Runs body(rank) on one thread per rank. Returns what each rank threw ("" for nothing).
template <class Body>
std::vector<std::string> on_threads(int size, const Body& body) {
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

Groups on_one_host(int size, std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Groups groups(static_cast<size_t>(size));
  const auto errors = on_threads(size, [&](int rank) {
    std::string why_not;
    groups[static_cast<size_t>(rank)] = group_on_one_host(store, rank, size, timeout, {}, &why_not);
    EXPECT_EQ(why_not, "");
  });
  EXPECT_EQ(errors, std::vector<std::string>(static_cast<size_t>(size)));
  return groups;
}

Members everyone(const Group& group) {
  Members members;
  members.ranks.resize(static_cast<size_t>(group.size()));
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  members.index = group.rank();
  return members;
}

// Buffers that are packed, buffers smaller than a tile, and a large number of buffers.
struct Work {
  std::vector<std::vector<float>> full, scratch, result;
  std::vector<ReduceBuffer> reduces;
  std::vector<GatherBuffer> gathers;
  std::vector<double> squares;

  Work(int size, int rank) : squares(5, -1.0) {
    for (const int64_t shard : {5, 40000, 0, 1000, 150001}) {
      std::vector<float>& values = full.emplace_back(size * shard);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = 0.1F * static_cast<float>((i + 1) * (rank + 3) % 1001);
      }
      scratch.emplace_back(size * shard);
      result.emplace_back(shard, 0.3F);
      gathers.push_back({values.data(), shard * 4});
      ReduceBuffer reduce{values.data(), scratch.back().data(), result.back().data()};
      reduce.numel = size * shard;
      reduce.scale = 0.7F;
      reduce.accumulate = shard % 2 == 1;
      reduce.squares = &squares[reduces.size()];
      reduces.push_back(reduce);
    }
  }
  Work(const Work&) = delete;
};

class ShmGroups : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ShmGroups, testing::Values(2, 3, 4, 7));

TEST_P(ShmGroups, CollectivesHaveTheBitsOfOtherGroups) {
  const int size = GetParam();
  const Groups shm = on_one_host(size), threads = Group::threads(size);
  const auto errors = on_threads(size, [&](int rank) {
    Work ours(size, rank), theirs(size, rank);
    for (const bool is_shm : {true, false}) {
      Group& group = is_shm ? *shm[rank] : *threads[rank];
      Work& work = is_shm ? ours : theirs;
      Channel channel(group, "test");
      const Members all = everyone(group);
      std::vector<char> staging(std::max(Channel::staging_bytes(all, work.gathers),
                                         Channel::staging_bytes(all, work.reduces)));
      const Staging lent{staging.data(), static_cast<int64_t>(staging.size())};
      channel.reduce_scatter("reduce", all, work.reduces, lent);
      channel.all_gather("gather", all, work.gathers, lent);
      channel.reduce_scatter("again", all, work.reduces);
      channel.all_reduce("all", all, work.reduces, lent);
      channel.broadcast("broadcast", all, work.full[1].data(), 40000 * 4);
      EXPECT_EQ(channel.share("share", all, "abc").size(), static_cast<size_t>(size));
    }
    EXPECT_TRUE(ours.full == theirs.full);
    EXPECT_TRUE(ours.result == theirs.result);
    EXPECT_TRUE(ours.squares == theirs.squares);
  });
  EXPECT_EQ(errors, std::vector<std::string>(static_cast<size_t>(size)));
  for (const auto& group : shm) EXPECT_EQ(group->transport(), "shm");
  for (const auto& group : shm) group->close();
  for (const auto& group : threads) group->close();
}

TEST(ShmGroup, AfterRenewRanksMatchAgain) {
  const Groups groups = on_one_host(2);
  const auto errors = on_threads(2, [&](int rank) {
    Group& group = *groups[rank];
    Channel channel(group, "control");
    std::vector<float> full(2, static_cast<float>(rank + 1));
    if (rank == 0) {
      channel.set_step(7);
      EXPECT_THROW(channel.all_gather("of rank 0", everyone(group), {{full.data(), 4}}),
                   RuntimeFault);
    }
    EXPECT_EQ(group.last_call(rank == 1 ? "no data" : ""), "rank 1: no data");
    EXPECT_THROW(channel.all_gather("late", everyone(group), {{full.data(), 4}}), RuntimeFault);
    group.renew();
    channel.renew();
    channel.all_gather("last", everyone(group), {{full.data(), 4}});
    EXPECT_EQ(full, (std::vector<float>{1.0F, 2.0F}));
    group.close();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(ShmGroup, DivergingRanksEndWithThePositionsOfBoth) {
  const Groups groups = on_one_host(2, std::chrono::seconds(3));
  const auto errors = on_threads(2, [&](int rank) {
    Channel channel(*groups[rank], "gather");
    channel.set_step(3);
    std::vector<float> full(2);
    // The first exchange waits for ranks to arrive.
    channel.all_gather("move u0 param", everyone(*groups[rank]), {{full.data(), 4}});
    channel.all_gather(rank == 0 ? "move u1 param" : "move u2 param", everyone(*groups[rank]),
                       {{full.data(), 4}});
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("move u1 param"), std::string::npos) << error;
    EXPECT_NE(error.find("move u2 param"), std::string::npos) << error;
  }
}

TEST(ShmGroup, APeerThatLeavesEndsTheOthers) {
  const Groups groups = on_one_host(3);
  const auto errors = on_threads(3, [&](int rank) {
    if (rank < 2) {
      Channel channel(*groups[rank], "reduce");
      std::vector<float> full(3);
      channel.all_gather("move u0 param", everyone(*groups[rank]), {{full.data(), 4}});
    }
    groups[rank]->close();
  });
  EXPECT_NE(errors[0].find("rank 2"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 2"), std::string::npos) << errors[1];
  EXPECT_EQ(errors[2], "");
}

// If one rank cannot share memory, all ranks report the same reason.
TEST(ShmMeeting, RanksAgreeWhereOneCannot) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string other = "another-host/pid:[1] 1 0 0";
  store->set("who/1", std::vector<uint8_t>(other.begin(), other.end()));
  const ShmMeeting met = meet_in_memory(*store, 0, 2, std::chrono::seconds(5));
  EXPECT_EQ(met.fabric, nullptr);
  EXPECT_FALSE(met.one_host);
  const auto two = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> why(2);
  const auto errors = on_threads(2, [&](int rank) {
    if (rank == 0) {
      why[0] = meet_in_memory(*two, 0, 2, std::chrono::seconds(5)).why_not;
      return;
    }
    // Simulates a rank that sees no other process.
    const std::vector<uint8_t> who = two->get("who/0");
    two->set("who/1", who);
    const std::string text = "pidfd_open of process 5: No such process";
    two->set("sees/1", std::vector<uint8_t>(text.begin(), text.end()));
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_EQ(why[0], "rank 1: pidfd_open of process 5: No such process");
}

}  // namespace
}  // namespace penstock::comm::group_test
