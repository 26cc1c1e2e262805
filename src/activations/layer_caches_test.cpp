#include "src/activations/layer_caches.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/error.h"

namespace penstock::activations {
namespace {

using Pair = LayerCache::Pair;

constexpr int kUnit = 3;

// Reads write their memory late, so that a test sees memory that is used again before.
class SlowIo final : public mem::BlockIo {
 public:
  void submit(mem::BlockRequest request) override {
    if (!request.write) {
      char* const wanted = request.data;
      const std::shared_ptr<void> room(
          std::aligned_alloc(mem::kBlockBytes, mem::block_padded(request.bytes)), std::free);
      request.data = static_cast<char*>(room.get());
      request.done = [done = std::move(request.done), wanted, room](int64_t moved) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (moved > 0) std::memcpy(wanted, room.get(), static_cast<size_t>(moved));
        done(moved);
      };
    }
    real_->submit(std::move(request));
  }
  const char* name() const override { return "slow"; }

 private:
  std::unique_ptr<mem::BlockIo> real_ = mem::BlockIo::threads(2);
};

class LayerCachesTest : public testing::TestWithParam<const char*> {
 protected:
  LayerCachesTest() : caches_(Placement::parse(GetParam())) {
    mem::DiskOptions options;
    options.paths = {std::filesystem::temp_directory_path()};
    options.make_io = [] { return std::make_unique<SlowIo>(); };
    if (on_disk()) caches_.open_disk(options);
  }
  bool on_disk() const { return Placement::parse(GetParam()).tier == Tier::kDisk; }
  bool exact() const { return !is_quantized(Placement::parse(GetParam()).dtype); }

  static Pair tokens(int64_t count, int64_t batch = 2) {
    const at::TensorOptions options(at::kBFloat16);
    return {at::randn({batch, 4, count, 32}, options), at::randn({batch, 4, count, 16}, options)};
  }

  // A forward of the unit: what the plan's lines and the layer do.
  Pair forward(const std::shared_ptr<LayerCache>& cache, const Pair& made) {
    caches_.bring(kUnit);
    const Pair all = caches_.add(kUnit, cache, made);
    const Pair kept{all.keys.clone(), all.values.clone()};
    caches_.put_away(kUnit);
    return kept;
  }

  // Half a step of int8 in a group with the largest value, and half a step of bf16.
  static double rounding(const at::Tensor& values) {
    if (values.numel() == 0) return 0;
    return values.abs().max().item<double>() * (1.0 / 254 + 1.0 / 256);
  }

  void expect_equal(const Pair& got, const std::vector<Pair>& added) const {
    std::vector<at::Tensor> keys, values;
    for (const Pair& one : added) {
      keys.push_back(one.keys);
      values.push_back(one.values);
    }
    for (const auto& [is, wanted] :
         {std::pair(got.keys, at::cat(keys, 2)), std::pair(got.values, at::cat(values, 2))}) {
      ASSERT_EQ(is.sizes(), wanted.sizes());
      if (exact()) {
        EXPECT_TRUE(at::equal(is, wanted));
      } else {
        EXPECT_TRUE(at::allclose(is.to(at::kFloat), wanted.to(at::kFloat), 0, rounding(wanted)));
      }
    }
  }

  void slide(int64_t window, bool past);

  LayerCaches caches_;
};

INSTANTIATE_TEST_SUITE_P(Tiers, LayerCachesTest,
                         testing::Values("SS@host:bf16", "SS@disk:bf16", "SS@host:int8/128",
                                         "SS@disk:int8/128"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) {
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           }
                           return name;
                         });

TEST_P(LayerCachesTest, ReturnsAllTokens) {
  const auto cache = caches_.make();
  std::vector<Pair> added;
  for (const int64_t count : {700, 1, 1, 254, 1, 256, 1, 0, 1023, 1}) {
    added.push_back(tokens(count));
    expect_equal(forward(cache, added.back()), added);
  }
  EXPECT_EQ(cache->tokens(), 700 + 1 + 1 + 254 + 1 + 256 + 1 + 1023 + 1);
}

TEST_P(LayerCachesTest, KeepsCachesApart) {
  const auto one = caches_.make(), other = caches_.make();
  std::vector<Pair> in_one, in_other;
  for (const int64_t count : {600, 1, 300, 1}) {
    in_one.push_back(tokens(count));
    in_other.push_back(tokens(count + 5, 3));
    expect_equal(forward(one, in_one.back()), in_one);
    expect_equal(forward(other, in_other.back()), in_other);
  }
}

TEST_P(LayerCachesTest, AddsTwiceInOneForward) {
  const auto cache = caches_.make();
  std::vector<Pair> added = {tokens(513), tokens(2)};
  caches_.add(kUnit, cache, added[0]);
  const Pair all = caches_.add(kUnit, cache, added[1]);
  expect_equal(all, added);
  caches_.put_away(kUnit);
}

TEST_P(LayerCachesTest, MemoryIsThatOfOneForward) {
  const auto cache = caches_.make();
  for (int i = 0; i < 8; ++i) forward(cache, tokens(512));
  const int64_t bytes = cache->tokens() * 2 * 4 * (32 + 16) * 2;
  const int64_t at_rest = exact() ? bytes : bytes * 33 / 64;
  if (on_disk()) {
    EXPECT_NEAR(static_cast<double>(caches_.shelf().disk_bytes()), static_cast<double>(at_rest),
                0.04 * static_cast<double>(bytes));  // whole disk blocks
    EXPECT_LT(caches_.shelf().peak_bytes(), 21 * (bytes + at_rest) / 20);
  } else {
    EXPECT_NEAR(static_cast<double>(caches_.shelf().live_bytes()), static_cast<double>(at_rest),
                0.01 * static_cast<double>(bytes));
  }
}

TEST_P(LayerCachesTest, ForwardsWithoutTheCacheBringNothing) {
  const auto cache = caches_.make();
  std::vector<Pair> added = {tokens(1024)};
  forward(cache, added[0]);
  caches_.bring(kUnit);
  caches_.put_away(kUnit);  // no tokens were added
  const int64_t without = caches_.shelf().live_bytes();
  caches_.bring(kUnit);  // so nothing comes for the next forward
  EXPECT_EQ(caches_.shelf().live_bytes(), without);
  caches_.put_away(kUnit);
  added.push_back(tokens(1));
  expect_equal(forward(cache, added.back()), added);
}

// What was brought for another cache is freed only after its transfers.
TEST_P(LayerCachesTest, CachesComeInTurn) {
  const std::vector<std::shared_ptr<LayerCache>> made = {caches_.make(), caches_.make()};
  std::vector<std::vector<Pair>> added(2);
  for (int turn = 0; turn < 20; ++turn) {
    const size_t which = turn % 3 == 1 ? 1 : 0;
    caches_.bring(kUnit);
    if (turn % 5 == 4) caches_.put_away(kUnit);  // a forward without a cache
    added[which].push_back(tokens(200 + turn));
    expect_equal(forward(made[which], added[which].back()), added[which]);
  }
}

TEST_P(LayerCachesTest, TokensOnTheirWayKeepTheirMemory) {
  for (int turn = 0; turn < 5; ++turn) {
    const auto brought = caches_.make(), used = caches_.make(), next = caches_.make();
    const Pair made = tokens(4000), more = tokens(300), last = tokens(2000), one = tokens(1);
    forward(brought, made);
    caches_.put_away(kUnit + 1);  // waits for the writes of this unit
    forward(used, more);          // the tokens of `brought` come for nothing
    forward(next, last);          // takes memory while those tokens may still come
    expect_equal(forward(next, one), {last, one});
    expect_equal(forward(used, one), {more, one});
    expect_equal(forward(brought, one), {made, one});
  }
}

TEST_P(LayerCachesTest, CopiesHaveTheirOwnTokens) {
  for (const int64_t window : {0, 300}) {
    const auto cache = caches_.make(window), other = caches_.make(window);
    const Pair made = tokens(777), one = tokens(1), two = tokens(2);
    forward(cache, made);
    other->copy(*cache);
    EXPECT_EQ(other->tokens(), 777);
    const int64_t seen = window == 0 ? 777 : window - 1;
    const Pair kept = {made.keys.narrow(2, 777 - seen, seen),
                       made.values.narrow(2, 777 - seen, seen)};
    expect_equal(forward(cache, one), {kept, one});
    cache->clear();
    expect_equal(forward(other, two), {kept, two});
  }
}

TEST_P(LayerCachesTest, MoreSequencesHaveSmallerChunks) {
  const auto cache = caches_.make();
  const Pair made = tokens(777, 1), more = tokens(1, 300);
  forward(cache, made);
  cache->select(at::zeros({300}, at::kLong));
  expect_equal(forward(cache, more),
               {{made.keys.repeat({300, 1, 1, 1}), made.values.repeat({300, 1, 1, 1})}, more});
  cache->remove_last(300);
  expect_equal(forward(cache, more), {{made.keys.narrow(2, 0, 478).repeat({300, 1, 1, 1}),
                                       made.values.narrow(2, 0, 478).repeat({300, 1, 1, 1})},
                                      more});
}

TEST_P(LayerCachesTest, TokensThatLeftTheWindowDoNotComeBack) {
  const auto cache = caches_.make(100);
  forward(cache, tokens(900));
  EXPECT_THROW(cache->remove_last(400), RuntimeFault);
  EXPECT_EQ(cache->tokens(), 900);
}

TEST_P(LayerCachesTest, SelectsSequences) {
  const auto cache = caches_.make();
  const Pair made = tokens(777);
  forward(cache, made);
  const at::Tensor chosen = at::tensor({1, 1, 0}, at::kLong);
  cache->select(chosen);
  EXPECT_EQ(cache->batch(), 3);
  const Pair more = tokens(1, 3);
  expect_equal(forward(cache, more),
               {{made.keys.index_select(0, chosen), made.values.index_select(0, chosen)}, more});
}

TEST_P(LayerCachesTest, RemovesTheLastTokens) {
  for (const int64_t gone : {0, 1, 9, 300, 776, 777, 900}) {
    const auto cache = caches_.make();
    const Pair made = tokens(777), more = tokens(2);
    forward(cache, made);
    cache->remove_last(gone);
    const int64_t left = std::max<int64_t>(0, 777 - gone);
    EXPECT_EQ(cache->tokens(), left);
    expect_equal(forward(cache, more),
                 {{made.keys.narrow(2, 0, left), made.values.narrow(2, 0, left)}, more});
  }
}

// `past`: keep_past(), and after each forward but the first, its last token is removed.
void LayerCachesTest::slide(int64_t window, bool past) {
  const auto cache = caches_.make(window);
  if (past) cache->keep_past();
  Pair all;
  const std::vector<int64_t> counts = {900, 1, 1, 400, 2, 256, 255, 1, 3};
  for (size_t i = 0; i < counts.size(); ++i) {
    const Pair made = tokens(counts[i]);
    all = i == 0 ? made
                 : Pair{at::cat({all.keys, made.keys}, 2), at::cat({all.values, made.values}, 2)};
    const int64_t count = all.keys.size(2);
    EXPECT_EQ(cache->tokens(), count - counts[i]);
    const int64_t seen = std::min(count, window - 1 + counts[i]);
    expect_equal(forward(cache, made), {{all.keys.narrow(2, count - seen, seen),
                                         all.values.narrow(2, count - seen, seen)}});
    if (!past) continue;
    const int64_t gone = i == 0 ? 0 : 1;
    cache->remove_last(gone);
    all = {all.keys.narrow(2, 0, count - gone), all.values.narrow(2, 0, count - gone)};
  }
  const int64_t bytes = std::min<int64_t>(window + 2 * 256, cache->tokens()) * 2 * 4 * 48 * 2;
  EXPECT_LE(caches_.shelf().live_bytes(), bytes + (1 << 16)) << window;
}

TEST_P(LayerCachesTest, WindowsSlide) {
  for (const int64_t window : {1, 2, 100, 256, 257, 700, 5000}) slide(window, false);
}

TEST_P(LayerCachesTest, WindowsSlideBack) {
  for (const int64_t window : {1, 2, 100, 256, 257, 700, 5000}) slide(window, true);
}

TEST_P(LayerCachesTest, FreesAll) {
  {
    const auto cache = caches_.make();
    forward(cache, tokens(2000));
    cache->clear();
    EXPECT_EQ(caches_.shelf().live_bytes(), 0);
    forward(cache, tokens(600, 5));
  }
  caches_.bring(kUnit);  // the cache is gone
  EXPECT_EQ(caches_.shelf().live_bytes(), 0);
}

TEST_P(LayerCachesTest, ClosedCachesSaySo) {
  const auto cache = caches_.make();
  const Pair first = caches_.add(kUnit, cache, tokens(900));
  const at::Tensor kept = first.keys.clone();
  caches_.close();
  EXPECT_THROW(caches_.make(), RuntimeFault);
  EXPECT_TRUE(at::equal(first.keys, kept)) << "the tensor of add() outlives the cache";
  try {
    cache->add(tokens(1));
    FAIL();
  } catch (const RuntimeFault& error) {
    EXPECT_NE(std::string(error.what()).find("close()"), std::string::npos) << error.what();
  }
}

std::string refusal(LayerCache& cache, const Pair& made) {
  try {
    cache.add(made);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST_P(LayerCachesTest, RefusesOtherTokens) {
  const auto cache = caches_.make();
  forward(cache, tokens(300));
  const Pair other = tokens(1, 3), wide = {tokens(1).values, tokens(1).keys};
  const Pair plain = {tokens(1).keys.to(at::kFloat), tokens(1).values.to(at::kFloat)};
  EXPECT_NE(refusal(*cache, other).find("do not fit the 300 tokens of 2 sequences"),
            std::string::npos);
  EXPECT_NE(refusal(*cache, wide).find("do not fit"), std::string::npos);
  EXPECT_NE(refusal(*cache, plain).find("another dtype"), std::string::npos);
  EXPECT_NE(refusal(*cache, {tokens(1).keys, tokens(2).values}).find("differ in their number"),
            std::string::npos);
  EXPECT_NE(refusal(*cache, {tokens(1).keys[0], tokens(1).values}).find("need the dims"),
            std::string::npos);
  const Pair trains = {tokens(1).keys.requires_grad_(), tokens(1).values};
  EXPECT_NE(refusal(*cache, trains).find("torch.no_grad()"), std::string::npos);
  EXPECT_EQ(forward(cache, tokens(1)).keys.size(2), 301) << "refused tokens change nothing";
}

}  // namespace
}  // namespace penstock::activations
