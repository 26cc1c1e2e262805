#include "src/comm/channel.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

#include "penstock/error.h"

namespace penstock::comm {
namespace {

// Runs `body(group)` on every rank and returns what each threw ("" for nothing).
template <typename Body>
std::vector<std::string> on_ranks(int size, const Body& body,
                                  std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  auto groups = Group::threads(size, timeout);
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*groups[rank]);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
      groups[rank]->close();
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
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
INSTANTIATE_TEST_SUITE_P(Sizes, Channels, testing::Values(1, 2, 3, 4, 7));

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
      std::chrono::milliseconds(300));
  for (const auto& error : errors) {
    EXPECT_NE(error.find("step 3"), std::string::npos) << error;
    EXPECT_NE(error.find("move u1 param"), std::string::npos) << error;
    EXPECT_NE(error.find("move u2 param"), std::string::npos) << error;
  }
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
}  // namespace penstock::comm
