#include "penstock/init.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "penstock/error.h"

namespace penstock {
namespace {

TEST(ShardedInit, KeepsPartsAndGivesWholeValues) {
  for (const int world : {1, 2, 3}) {
    auto groups = Group::threads(world);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&groups, rank] {
        ShardedInit init(groups[rank]);
        const at::Tensor expected = at::arange(35, at::kBFloat16).view({5, 7});
        at::Tensor tensor = expected.clone();
        init.hollow(tensor);
        const at::Tensor row = tensor.select(0, 1);
        EXPECT_TRUE(init.holds(tensor) && init.holds(row) && !init.holds(expected));
        EXPECT_EQ(tensor.sizes(), expected.sizes());
        EXPECT_THROW(tensor.sum(), c10::Error);
        at::Tensor whole = init.whole(row);
        EXPECT_TRUE(whole.view({5, 7}).equal(expected));
        whole.add_(1);
        init.keep(tensor, whole);
        const at::Tensor twin = init.copy(tensor);
        init.keep(tensor, expected.reshape({-1}));
        EXPECT_THROW(twin.sum(), c10::Error);
        EXPECT_TRUE(init.take(twin).equal(expected + 1));
        EXPECT_TRUE(init.holds(tensor) && !init.empty());
        EXPECT_TRUE(init.take(tensor).equal(expected));
        EXPECT_TRUE(init.empty());
        groups[rank]->close();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// Ranks free a tensor at different times, then meet in another group.
TEST(ShardedInit, KeepsPartsThroughANewGroup) {
  auto groups = Group::threads(2), others = Group::threads(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ShardedInit init(groups[rank]);
      at::Tensor kept = at::arange(7, at::kFloat), dropped = at::arange(3, at::kFloat);
      init.hollow(kept);
      init.hollow(dropped);
      if (rank == 1) dropped = at::Tensor();
      EXPECT_FALSE(init.empty());
      init.connect(others[rank]);
      groups[rank]->close();
      EXPECT_TRUE(init.take(kept).equal(at::arange(7, at::kFloat)));
      EXPECT_EQ(init.empty(), rank == 1);
      EXPECT_THROW(init.connect(Group::alone()), RuntimeFault);
      others[rank]->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace penstock
