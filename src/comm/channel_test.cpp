#include "src/comm/channel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <set>
#include <vector>

#include "penstock/error.h"
#include "src/comm/on_ranks.h"
#include "src/place/packing.h"

namespace {
thread_local int64_t allocations = 0;
}  // namespace

// Counts allocations: replaces the allocation functions of this test program.
void* operator new(size_t bytes) {
  ++allocations;
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace penstock::comm::channel_test {
namespace {

Staging lent(std::vector<char>& memory) {
  return {memory.data(), static_cast<int64_t>(memory.size())};
}

Members everyone(const Group& group) {
  Members members;
  members.ranks.resize(group.size());
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  members.index = group.rank();
  return members;
}

class Channels : public testing::TestWithParam<int> {};

TEST_P(Channels, CollectivesGiveTheSumsAndCopiesTheyPromise) {
  const int size = GetParam();
  const auto errors = on_ranks(size, [size](Group& group) {
    Channel channel(group, "test");
    const Members all = everyone(group);
    const int64_t shard = 5;
    std::vector<float> full(size * shard, -1.0F);
    for (int i = 0; i < shard; ++i) full[group.rank() * shard + i] = group.rank() * 10.0F + i;
    channel.all_gather("gather", all, {{full.data(), shard * 4}});
    for (int i = 0; i < size * shard; ++i) EXPECT_EQ(full[i], i / shard * 10.0F + i % shard);

    std::vector<float> partial(size * shard), scratch(size * shard), result(shard, 100.0F);
    for (int i = 0; i < size * shard; ++i) partial[i] = static_cast<float>(i * (group.rank() + 1));
    ReduceBuffer buffer;
    buffer.partial = partial.data();
    buffer.scratch = scratch.data();
    buffer.result = result.data();
    buffer.numel = size * shard;
    buffer.scale = 0.5F;
    buffer.accumulate = true;
    channel.reduce_scatter("reduce", all, {buffer});
    const float ranks = size * (size + 1) / 2.0F;
    for (int i = 0; i < shard; ++i) {
      EXPECT_EQ(result[i], 100.0F + 0.5F * ranks * (group.rank() * shard + i));
    }
    channel.all_reduce("all", all, {buffer});
    for (int i = 0; i < size * shard; ++i) EXPECT_EQ(partial[i], 0.5F * ranks * i);

    const auto shared = channel.share("share", all, std::string(3, 'a' + group.rank()));
    for (int i = 0; i < size; ++i) EXPECT_EQ(shared[i], std::string(3, 'a' + i));
    int value = group.rank() == 0 ? 7 : 0;
    channel.broadcast("broadcast", all, &value, sizeof(value));
    EXPECT_EQ(value, 7);
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}
// Fused buffers with shards of `kShards` values; the last is too large to be packed.
constexpr int64_t kShards[] = {5, 1000, 1, 0, 77, kPackBytes / 4 + 3};

struct Fused {
  std::vector<std::vector<float>> full, scratch, result;
  std::vector<GatherBuffer> gathers;
  std::vector<ReduceBuffer> reduces;

  Fused(const Fused&) = delete;
  Fused(int size, int rank) {
    for (const int64_t shard : kShards) {
      full.emplace_back(size * shard);
      for (size_t i = 0; i < full.back().size(); ++i) {
        full.back()[i] = 0.1F * static_cast<float>((i + 1) * (rank + 3) % 1001);
      }
      scratch.emplace_back(size * shard);
      result.emplace_back(shard, 0.3F);
      gathers.push_back({full.back().data(), shard * 4});
      ReduceBuffer reduce{full.back().data(), scratch.back().data(), result.back().data()};
      reduce.numel = size * shard;
      reduce.scale = 0.7F;
      reduce.accumulate = shard % 2 == 1;
      reduces.push_back(reduce);
    }
  }
};

TEST_P(Channels, PackedBuffersHaveTheBitsOfTheirOwn) {
  const int size = GetParam();
  const auto errors = on_ranks(size, [size](Group& group) {
    Channel channel(group, "test");
    const Members all = everyone(group);
    Fused alone(size, group.rank()), packed(size, group.rank());
    std::vector<char> staging(std::max(Channel::staging_bytes(all, packed.gathers),
                                       Channel::staging_bytes(all, packed.reduces)));
    std::vector<double> squares(std::size(kShards), -1.0);
    for (size_t i = 0; i < squares.size(); ++i) packed.reduces[i].squares = &squares[i];
    channel.reduce_scatter("reduce", all, alone.reduces);
    channel.reduce_scatter("reduce", all, packed.reduces, lent(staging));
    for (size_t i = 0; i < squares.size(); ++i) {
      double expected = 0.0;
      for (const double value : packed.result[i]) expected += value * value;
      EXPECT_NEAR(squares[i], expected, 1e-9 * expected);
    }
    EXPECT_TRUE(alone.result == packed.result);
    channel.all_reduce("all", all, alone.reduces);
    channel.all_reduce("all", all, packed.reduces, lent(staging));
    EXPECT_TRUE(alone.full == packed.full);
    Fused gathered(size, group.rank()), packed_gathered(size, group.rank());
    channel.all_gather("gather", all, gathered.gathers);
    channel.all_gather("gather", all, packed_gathered.gathers, lent(staging));
    EXPECT_TRUE(gathered.full == packed_gathered.full);
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

INSTANTIATE_TEST_SUITE_P(Sizes, Channels, testing::Values(1, 2, 3, 4, 7, 8, 9, 13, 16));

TEST(Channel, RanksThatDivergeEndWithAnErrorThatShowsBothSteps) {
  const auto errors = on_ranks(
      2,
      [](Group& group) {
        Channel channel(group, "gather");
        channel.set_step(3);
        std::vector<float> full(2);
        const char* label = group.rank() == 0 ? "move u1 param" : "move u2 param";
        channel.all_gather(label, everyone(group), {{full.data(), 4}});
      },
      std::chrono::seconds(3));
  for (const auto& error : errors) {
    EXPECT_NE(error.find("step 3"), std::string::npos) << error;
    EXPECT_NE(error.find("move u1 param"), std::string::npos) << error;
    EXPECT_NE(error.find("move u2 param"), std::string::npos) << error;
  }
}

// Rank 0 of a group whose peers send back what they receive. Keeps the last tag and position.
class Echo final : public Group {
 public:
  explicit Echo(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag_of_call) override {
    for (size_t i = 0; i < receives.size(); ++i) {
      // A rank may hold nothing of the gathered buffer: its piece has no bytes and no address.
      if (sends[i].bytes > 0) {
        std::memcpy(receives[i].data, sends[i].data, static_cast<size_t>(sends[i].bytes));
      }
    }
    tag = tag_of_call;
    pieces = sends.size();
  }
  std::string transport() const override { return "echo"; }
  void set_position(Position where) override { position = std::move(where); }
  std::string roll_call(const std::string& error) override { return error; }
  std::string last_call(const std::string& /*fault*/) override { return ""; }
  void end_exchanges(const std::string& /*why*/) override {}
  void renew() override {}
  void close() override {}

  uint32_t tag = 0;
  size_t pieces = 0;
  Position position;

 private:
  const int size_;
};

TEST(Channel, TagsDifferInLaneStepSequenceLabelAndSizes) {
  Echo group(2);
  const auto tag = [&](const char* lane, int64_t step, int before, const char* label,
                       const std::vector<int64_t>& sizes) {
    Channel channel(group, lane);
    channel.set_step(step);
    std::vector<char> full(1024);
    std::vector<GatherBuffer> buffers;
    for (const int64_t size : sizes) buffers.push_back({full.data(), size});
    for (int i = 0; i <= before; ++i) channel.all_gather(label, everyone(group), buffers);
    EXPECT_EQ(channel.exchanges(), before + 1);
    return group.tag;
  };
  std::set<uint32_t> tags;
  for (const char* lane : {"gather", "reduce"})
    for (const int64_t step : {1, 2, 257})
      for (const int before : {0, 1, 5})
        for (const char* label : {"move u1 param", "move u2 param"})
          for (const auto& sizes :
               std::vector<std::vector<int64_t>>{{8}, {16}, {8, 16}, {16, 8}, {8, 8}, {0, 8}})
            tags.insert(tag(lane, step, before, label, sizes));
  EXPECT_EQ(tags.size(), 2U * 3 * 3 * 2 * 6);
  EXPECT_EQ(tag("gather", 3, 2, "move u1 param", {8}), tag("gather", 3, 2, "move u1 param", {8}));
}

TEST(Channel, ThePositionOutlivesItsChannelAndItsLabel) {
  Echo group(2);
  {
    Channel channel(group, "a lane with a name too long for the inside of a string");
    channel.set_step(7);
    std::vector<char> full(2);
    const Label label("a label with a text too long for the inside of a string");
    channel.all_gather(label, everyone(group), {{full.data(), 1}});
  }
  EXPECT_EQ(group.position.text(),
            "step 7, collective 0 of lane a lane with a name too long for the inside of a string, "
            "`a label with a text too long for the inside of a string`");
}

TEST(Channel, SmallBuffersTravelAsOnePiece) {
  Echo group(3);
  Channel channel(group, "gather");
  const Members all = everyone(group);
  Fused fused(3, 0);
  std::vector<char> staging(Channel::staging_bytes(all, fused.reduces));
  channel.all_gather("move", all, fused.gathers);
  EXPECT_EQ(group.pieces, 2U * 6);
  channel.all_gather("move", all, fused.gathers, lent(staging));
  EXPECT_EQ(group.pieces, 2U * 2);
  channel.reduce_scatter("move", all, fused.reduces, lent(staging));
  EXPECT_EQ(group.pieces, 2U * 2);
  channel.all_gather("move", all, {fused.gathers[0]}, lent(staging));
  EXPECT_EQ(group.pieces, 2U);
  EXPECT_EQ(Channel::staging_bytes(all, std::vector<GatherBuffer>{fused.gathers[0]}), 0);
  staging.resize(8);
  EXPECT_THROW(channel.all_gather("move", all, fused.gathers, lent(staging)), Bug);
}

TEST(Channel, ARankThatPacksAndOneThatDoesNotDoNotMatch) {
  const auto errors = on_ranks(
      2,
      [](Group& group) {
        Channel channel(group, "reduce");
        Fused fused(2, group.rank());
        std::vector<char> staging(Channel::staging_bytes(everyone(group), fused.reduces));
        if (group.rank() == 0) staging.clear();
        channel.reduce_scatter("move u1 grad", everyone(group), fused.reduces, lent(staging));
      },
      std::chrono::seconds(3));
  for (const auto& error : errors) EXPECT_NE(error.find("move u1 grad"), std::string::npos);
}

TEST(Channel, AllocatesNothingOnceWarm) {
  Echo group(3);
  Channel channel(group, "gather");
  const Members all = everyone(group);
  const Label label("move u1,u2 param all_gather(local)");
  std::vector<float> full(60), scratch(60);
  const std::vector<GatherBuffer> gathers = {{full.data(), 40}, {full.data() + 30, 40}};
  ReduceBuffer one{full.data(), scratch.data(), full.data(), Dtype::kFp32, Dtype::kFp32, 30};
  ReduceBuffer two = one;
  two.partial = two.result = full.data() + 30;
  two.scratch = scratch.data() + 30;
  const std::vector<ReduceBuffer> reduces = {one, two};
  std::vector<char> staging(Channel::staging_bytes(all, reduces));
  int64_t before = 0;
  for (int round = 0; round < 5; ++round) {
    if (round == 1) before = allocations;
    channel.all_gather(label, all, gathers);
    channel.reduce_scatter(label, all, reduces);
    channel.all_reduce(label, all, reduces);
    channel.all_gather(label, all, gathers, lent(staging));
    channel.all_reduce(label, all, reduces, lent(staging));
    channel.broadcast(label, all, full.data(), 8);
  }
  EXPECT_GT(before, 0);  // the counter works
  EXPECT_EQ(allocations, before);
  EXPECT_EQ(channel.exchanges(), 5 * 9);
}

// A rank of a group on nodes of eight ranks. Counts the bytes that it sends.
class Counted final : public Group {
 public:
  explicit Counted(Group& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag) override {
    ++rounds;
    std::set<int> peers;
    for (const Piece& piece : sends) {
      peers.insert(piece.peer);
      if (piece.peer / 8 != rank() / 8) to_other_nodes += piece.bytes;
    }
    messages += static_cast<int64_t>(peers.size());
    inner_.exchange(sends, receives, tag);
  }
  std::string transport() const override { return inner_.transport(); }
  void set_position(Position where) override { inner_.set_position(std::move(where)); }
  std::string roll_call(const std::string& error) override { return inner_.roll_call(error); }
  std::string last_call(const std::string& fault) override { return inner_.last_call(fault); }
  void end_exchanges(const std::string& why) override { inner_.end_exchanges(why); }
  void renew() override { inner_.renew(); }
  void close() override { inner_.close(); }

  int64_t rounds = 0, messages = 0, to_other_nodes = 0;

 private:
  Group& inner_;
};

TEST(Channel, OfManyRanksNoGatherSendsToAll) {
  constexpr int kRanks = 64;
  constexpr int64_t kLarge = 40000;
  std::vector<std::array<int64_t, 3>> small(kRanks), ring(kRanks), tree(kRanks);
  const auto errors = on_ranks(kRanks, [&](Group& inner) {
    const auto count = [&](const auto& body) {
      Counted group(inner);
      Channel channel(group, "test");
      body(channel, everyone(group));
      return std::array{group.rounds, group.messages, group.to_other_nodes};
    };
    const int rank = inner.rank();
    small[rank] = count([&](Channel& channel, const Members& all) {
      const auto shared = channel.share("share", all, std::string(10, static_cast<char>(rank)));
      for (int i = 0; i < kRanks; ++i) EXPECT_EQ(shared[i], std::string(10, static_cast<char>(i)));
    });
    ring[rank] = count([&](Channel& channel, const Members& all) {
      std::vector<char> full(kRanks * kLarge);
      std::fill_n(full.begin() + rank * kLarge, kLarge, static_cast<char>(rank + 1));
      channel.all_gather("gather", all, {{full.data(), kLarge}});
      for (int64_t i = 0; i < kRanks * kLarge; ++i) ASSERT_EQ(full[i], i / kLarge + 1);
    });
    tree[rank] = count([&](Channel& channel, const Members& all) {
      std::vector<char> data(kLarge, static_cast<char>(rank));
      channel.broadcast("broadcast", all, data.data(), kLarge);
      EXPECT_EQ(data, std::vector<char>(kLarge, 0));
    });
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(small[rank][0], 6);
    EXPECT_EQ(small[rank][1], 6);
    EXPECT_EQ(ring[rank][1], kRanks - 1);
    // One rank of each node sends to another node.
    EXPECT_EQ(ring[rank][2], rank % 8 == 0 ? (kRanks - 1) * kLarge : 0);
    EXPECT_EQ(tree[rank][0], 6);
  }
  EXPECT_EQ(tree[0][1], 6);
}

TEST(Channel, CollectBringsShardsToTheFirstOwnerAlone) {
  const auto errors = on_ranks(4, [](Group& group) {
    Channel channel(group, "control");
    const Members owners{{0, 2, 3}, group.rank() == 1 ? -1 : std::max(0, group.rank() - 1)};
    std::vector<int> data(3, group.rank());
    channel.collect("read u1.0", owners, data.data(), sizeof(int));
    const std::vector<int> all = {0, 2, 3};
    EXPECT_EQ(data, group.rank() == 0 ? all : std::vector<int>(3, group.rank()));
    EXPECT_EQ(channel.exchanges(), 1);
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST(Channel, AfterRenewRanksMatchAgain) {
  const auto errors = on_ranks(2, [](Group& group) {
    Channel channel(group, "control");
    std::vector<float> full(2, static_cast<float>(group.rank() + 1));
    if (group.rank() == 0) {
      channel.set_step(7);
      EXPECT_THROW(channel.all_gather("of rank 0", everyone(group), {{full.data(), 4}}),
                   RuntimeFault);
    }
    EXPECT_EQ(group.last_call(group.rank() == 1 ? "no data" : ""), "rank 1: no data");
    EXPECT_THROW(channel.all_gather("late", everyone(group), {{full.data(), 4}}), RuntimeFault);
    group.renew();
    channel.renew();
    channel.all_gather("last", everyone(group), {{full.data(), 4}});
    EXPECT_EQ(full, (std::vector<float>{1.0F, 2.0F}));
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST(Channel, APeerThatLeavesEndsTheOthers) {
  const auto errors = on_ranks(3, [](Group& group) {
    if (group.rank() == 2) return;
    Channel channel(group, "reduce");
    std::vector<float> full(3);
    channel.all_gather("move u0 param", everyone(group), {{full.data(), 4}});
  });
  EXPECT_NE(errors[0].find("rank 2"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 2"), std::string::npos) << errors[1];
  EXPECT_EQ(errors[2], "");
}

}  // namespace
}  // namespace penstock::comm::channel_test
