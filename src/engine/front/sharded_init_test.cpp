#include "penstock/init.h"

#include <unistd.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/ckpt/weights_file.h"

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

// Each rank reads its part of the values from a file until they are replaced.
TEST(ShardedInit, ReadsFromAFile) {
  const at::Tensor values = at::arange(35, at::kFloat).div_(3);
  const std::string path =
      (std::filesystem::temp_directory_path() / concat("init_test_", getpid())).string();
  std::ofstream(path, std::ios::binary).write(static_cast<const char*>(values.data_ptr()), 35 * 4);
  const auto file = std::make_shared<WeightsFile>(path);
  std::filesystem::remove(path);
  auto groups = Group::threads(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ShardedInit init(groups[rank]);
      const at::Tensor built = at::zeros({5, 7}, at::kBFloat16);
      const at::Tensor meta = at::empty({5, 7}, at::TensorOptions(at::kFloat).device(at::kMeta));
      init.hollow(built);
      EXPECT_EQ(init.held_bytes(built), 36);
      init.read_from(built, {file, at::kFloat, 0});
      init.read_from(meta, {file, at::kFloat, 0});
      EXPECT_TRUE(meta.is_cpu() && init.in_file(meta) && init.held_bytes(built) == 0);
      at::Tensor part = at::empty({9}, at::kFloat);
      init.read(built.narrow(0, 2, 2), 1, part);
      EXPECT_TRUE(part.equal(values.narrow(0, 15, 9)));  // not rounded to bf16
      const at::Tensor twin = init.copy(built);
      at::Tensor whole = init.whole(built);
      EXPECT_TRUE(whole.equal(values.to(at::kBFloat16)));
      init.keep(built, whole.add_(1));
      EXPECT_TRUE(!init.in_file(built) && init.in_file(twin));
      EXPECT_TRUE(init.take(built).flatten().equal(values.to(at::kBFloat16) + 1));
      EXPECT_TRUE(init.take(twin).flatten().equal(values.to(at::kBFloat16)));
      EXPECT_TRUE(init.take(meta).flatten().equal(values));
      EXPECT_TRUE(init.empty());
      groups[rank]->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace penstock
