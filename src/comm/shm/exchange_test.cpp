#include "src/comm/shm/exchange.h"

#include <sys/wait.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <csignal>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace penstock::comm {
namespace {

using std::chrono::milliseconds;

const ShmWait kPatient{std::chrono::seconds(20), {}};

// Ranks that are threads share one mapping, so that a thread sanitizer can check them.
struct Host {
  Host(int size, bool spans) {
    const auto segment = std::make_shared<ShmSegment>(ShmSegment::make({size, spans}, 7));
    for (int rank = 0; rank < size; ++rank) {
      fabrics.push_back(
          std::make_unique<ShmFabric>(segment, rank, std::vector<int64_t>(size, getpid())));
    }
  }
  // Runs body(fabric) on every rank. Returns what each rank threw ("" for nothing).
  template <class Body>
  std::vector<std::string> run(const Body& body) {
    std::vector<std::string> errors(fabrics.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < fabrics.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(*fabrics[rank]);
        } catch (const std::exception& error) {
          errors[rank] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
  std::vector<std::unique_ptr<ShmFabric>> fabrics;
};

std::vector<char> content(int from, int to, int64_t bytes) {
  std::vector<char> data(static_cast<size_t>(bytes));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 7 + from * 31 + to);
  return data;
}

// Every rank sends messages of these sizes to every rank, as one exchange.
void all_to_all(ShmFabric& fabric, const std::vector<int64_t>& sizes, uint32_t tag) {
  std::vector<std::vector<char>> sent, received;
  std::vector<Piece> sends, receives;
  for (int peer = 0; peer < fabric.size(); ++peer) {
    if (peer == fabric.rank()) continue;
    for (const int64_t bytes : sizes) {
      sent.push_back(content(fabric.rank(), peer, bytes));
      received.emplace_back(static_cast<size_t>(bytes));
      sends.push_back({peer, sent.back().data(), bytes});
      receives.push_back({peer, received.back().data(), bytes});
    }
  }
  ShmExchange(fabric, sends, receives, tag).finish(kPatient);
  for (size_t i = 0; i < receives.size(); ++i) {
    const bool same = received[i] == content(receives[i].peer, fabric.rank(), receives[i].bytes);
    EXPECT_TRUE(same) << receives[i].bytes << " bytes from rank " << receives[i].peer;
  }
}

class Forms : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Shm, Forms, testing::Values(false, true),
                         [](const auto& form) { return form.param ? "Spans" : "Chunked"; });

TEST_P(Forms, MessagesOfAnySizeArriveAsTheyWereSent) {
  Host host(3, GetParam());
  const auto errors = host.run([](ShmFabric& fabric) {
    const std::vector<std::vector<int64_t>> cases = {{0},
                                                     {1},
                                                     {4096},
                                                     {4097},
                                                     {65536},
                                                     {65537},
                                                     {0, 3, 0},
                                                     {1 << 20},
                                                     {5, 100000, 1, 0, 77777},
                                                     std::vector<int64_t>(50, 999)};
    uint32_t tag = 0;
    for (const auto& sizes : cases) all_to_all(fabric, sizes, tag++);
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST_P(Forms, SeveralThreadsOfARankExchangeAtOnce) {
  Host host(2, GetParam());
  const auto errors = host.run([](ShmFabric& fabric) {
    std::vector<std::thread> lanes;
    for (uint32_t lane = 0; lane < 4; ++lane) {
      lanes.emplace_back([&fabric, lane] {
        for (uint32_t round = 0; round < 200; ++round) {
          all_to_all(fabric, {static_cast<int64_t>(round * 97 % 9000)}, lane * 1000 + round);
        }
      });
    }
    for (std::thread& lane : lanes) lane.join();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

// More messages than slots. Messages of one tag arrive in the order in which they were sent.
TEST_P(Forms, ManyMessagesUnderWayKeepTheirOrder) {
  constexpr int kMany = 100;
  Host host(2, GetParam());
  const auto errors = host.run([](ShmFabric& fabric) {
    std::vector<std::vector<int>> data(kMany, std::vector<int>(5000, -1));
    std::vector<std::unique_ptr<ShmExchange>> all;
    for (int i = 0; i < kMany; ++i) {
      const Piece piece{1 - fabric.rank(), data[i].data(), 5000 * sizeof(int)};
      if (fabric.rank() == 0) std::iota(data[i].begin(), data[i].end(), i);
      const std::vector<Piece> none, one{piece};
      all.push_back(std::make_unique<ShmExchange>(fabric, fabric.rank() == 0 ? one : none,
                                                  fabric.rank() == 0 ? none : one, 5));
    }
    for (int i = 0; i < kMany; ++i) {
      // Rank 0 posts as many messages as there are slots, in order.
      for (int next = i; next < kMany && fabric.rank() == 0; ++next) {
        all[next]->advance();
        if (!all[next]->posted()) break;
      }
      all[i]->finish(kPatient);
      EXPECT_EQ(data[i].front(), i);
      EXPECT_EQ(data[i].back(), i + 4999);
    }
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST_P(Forms, AMessageCanBeReadInParts) {
  constexpr int64_t kValues = 40000;
  Host host(3, GetParam());
  const auto errors = host.run([](ShmFabric& fabric) {
    std::vector<int> own(kValues, fabric.rank());
    std::iota(own.begin(), own.end(), fabric.rank() * 1000);
    std::vector<Piece> sends, receives;
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == fabric.rank()) continue;
      sends.push_back({peer, own.data(), kValues * 4});
      receives.push_back({peer, nullptr, kValues * 4});
    }
    ShmExchange exchange(fabric, sends, receives, 9);
    for (int64_t at = 0; at < kValues; at += 1234) {
      const int64_t count = std::min<int64_t>(1234, kValues - at);
      for (const Piece& piece : receives) {
        std::vector<int> part(static_cast<size_t>(count));
        SpanCursor to(
            {{reinterpret_cast<uint64_t>(part.data()), static_cast<uint64_t>(count * 4)}});
        exchange.read(piece.peer, to, kPatient);
        EXPECT_EQ(part.front(), piece.peer * 1000 + at);
        EXPECT_EQ(part.back(), piece.peer * 1000 + at + count - 1);
      }
    }
    exchange.finish(kPatient);
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST_P(Forms, ARankThatGivesUpEndsItsPeersWaitsForItAndNoOthers) {
  Host host(3, GetParam());
  const auto errors = host.run([](ShmFabric& fabric) {
    std::vector<char> data(100000);
    const int next = (fabric.rank() + 1) % 3;
    if (fabric.rank() == 0) {  // rank 1 receives under another tag
      ShmExchange(fabric, {{next, data.data(), 100000}}, {}, 1).finish({milliseconds(50), {}});
    }
    if (fabric.rank() == 1) ShmExchange(fabric, {}, {{0, data.data(), 100000}}, 2).finish(kPatient);
    if (fabric.rank() == 2) all_to_all(fabric, {}, 3);
  });
  EXPECT_EQ(errors[0], "nothing arrived from rank 1 within 0.05 s");
  EXPECT_EQ(errors[1], "rank 0 has given up an exchange with rank 1");
  EXPECT_EQ(errors[2], "");
  const auto later = host.run([](ShmFabric& fabric) {
    std::vector<char> data(8);
    if (fabric.rank() == 0) ShmExchange(fabric, {{1, data.data(), 8}}, {}, 4).finish(kPatient);
    if (fabric.rank() == 1) ShmExchange(fabric, {{2, data.data(), 8}}, {}, 4).finish(kPatient);
    if (fabric.rank() == 2) ShmExchange(fabric, {}, {{1, data.data(), 8}}, 4).finish(kPatient);
  });
  // A message that needs no answer may have been sent.
  EXPECT_EQ(later[1] + later[2], "");
}

TEST_P(Forms, WhatCannotBeIsSaid) {
  Host host(2, GetParam());
  std::vector<char> data(100000);
  const Piece of_1{1, data.data(), 100000}, of_0{0, data.data(), 99999};
  const auto sizes = host.run([&](ShmFabric& fabric) {
    std::vector<char> own(100000);
    if (fabric.rank() == 0) ShmExchange(fabric, {{1, own.data(), 100000}}, {}, 1).finish(kPatient);
    if (fabric.rank() == 1) ShmExchange(fabric, {}, {of_0}, 1).finish(kPatient);
  });
  EXPECT_EQ(sizes[1], "rank 0 sent 100000 bytes where 99999 were expected");
  EXPECT_EQ(sizes[0], "rank 1 has given up an exchange with rank 0");

  Host ending(2, GetParam());
  std::thread ends([&] { ending.fabrics[0]->end("enough"); });
  EXPECT_THROW(ShmExchange(*ending.fabrics[0], {}, {of_1}, 1).finish(kPatient), std::runtime_error);
  ends.join();

  Host leaving(2, GetParam());
  std::thread leaves([&] { leaving.fabrics[1].reset(); });
  try {
    ShmExchange(*leaving.fabrics[0], {}, {of_1}, 1).finish(kPatient);
    ADD_FAILURE();
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "rank 1 has closed its connections");
  }
  leaves.join();
}

// Two processes: rank 1 is killed while rank 0 waits for it, in the middle of a message.
TEST_P(Forms, AKilledProcessIsFoundAtOnce) {
  ShmSegment made = ShmSegment::make({2, GetParam()}, 11);
  const ShmAddress at = made.address();
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    // The child does not inherit the parent's mapping; it opens the memory as any rank does.
    auto segment = std::make_shared<ShmSegment>(ShmSegment::open({2, GetParam()}, at));
    ShmFabric fabric(segment, 1, {parent, getpid()});
    std::vector<char> data(1 << 20);
    all_to_all(fabric, {1 << 20}, 1);
    ShmExchange(fabric, {{0, data.data(), 1 << 20}}, {}, 3).finish(kPatient);
    _exit(0);
  }
  auto segment = std::make_shared<ShmSegment>(std::move(made));
  ShmFabric fabric(segment, 0, {parent, child});
  all_to_all(fabric, {1 << 20}, 1);
  std::thread kills([child] { kill(child, SIGKILL); });
  std::vector<char> data(1 << 20);
  const auto begin = std::chrono::steady_clock::now();
  try {
    ShmExchange(fabric, {}, {{1, data.data(), 1 << 20}}, 2).finish(kPatient);
    ADD_FAILURE();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("rank 1 is gone: its process"), 0U) << text;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kPatient.limit);
  kills.join();
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
}

TEST(ShmSegment, OpensNothingElse) {
  const ShmSegment made = ShmSegment::make({2, true}, 5);
  ShmAddress at = made.address();
  EXPECT_NO_THROW(ShmSegment::open({2, true}, at));
  EXPECT_THROW(ShmSegment::open({3, true}, at), std::runtime_error);
  at.key = 6;
  EXPECT_THROW(ShmSegment::open({2, true}, at), std::runtime_error);
  at.file = 4000;
  EXPECT_THROW(ShmSegment::open({2, true}, at), std::runtime_error);
}

}  // namespace
}  // namespace penstock::comm
