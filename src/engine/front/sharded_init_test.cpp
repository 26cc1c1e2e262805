#include "penstock/init.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

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
        EXPECT_TRUE(init.take(tensor).equal(expected + 1));
        EXPECT_TRUE(init.empty());
        groups[rank]->close();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace penstock
