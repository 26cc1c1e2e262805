#include "src/exec/flat.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "src/base/text.h"
#include "src/mem/arena.h"

namespace penstock::exec {
namespace {

Slot slot_of(const std::string& name, const at::Tensor& param) {
  Slot slot;
  slot.name = name;
  slot.param = param;
  return slot;
}

TEST(Flat, ParametersAreWindowsAndReadingAFreedOneNamesIt) {
  mem::Pool pool;
  mem::Arena arena(pool);
  at::Tensor a = at::arange(6, at::kFloat).view({2, 3}).clone();
  at::Tensor b = at::arange(5, at::kFloat).clone();
  Flat flat(Dtype::kFp32, true);
  flat.add(slot_of("block.a", a), "block");
  flat.add(slot_of("block.b", b), "block");
  flat.seal(3);
  EXPECT_EQ(flat.slots[1].offset, 16);  // 64-byte alignment
  EXPECT_EQ(flat.numel % (3 * 128), 0);

  const mem::Lease whole = arena.take(flat.numel * 4, mem::Account::kParam);
  auto* values = reinterpret_cast<float*>(whole.data().host());
  for (int64_t i = 0; i < flat.numel; ++i) values[i] = 1.0F;
  flat.attach(whole.data().host());
  EXPECT_FLOAT_EQ(a.sum().item<float>(), 6.0F);
  const at::Tensor view = a.t();
  flat.detach();
  EXPECT_EQ(a.sizes(), at::IntArrayRef({2, 3}));
  try {
    view.sum();
    FAIL() << "reading a freed parameter must throw";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("block.a"), std::string::npos);
  }
  flat.attach(whole.data().host());
  EXPECT_FLOAT_EQ(view.sum().item<float>(), 6.0F);
  flat.detach();
}

// Returns where parameters of these sizes are in the whole layout.
Flat whole_of(const std::vector<int64_t>& sizes, std::vector<int64_t>& loads) {
  Flat flat(Dtype::kFp32, true);
  for (size_t i = 0; i < sizes.size(); ++i) {
    flat.add(slot_of(concat("p", i), at::zeros({sizes[i]})), "u");
  }
  flat.seal_whole(static_cast<int>(loads.size()), loads);
  return flat;
}

TEST(Flat, InTheWholeLayoutNoShardHasAPartOfAParameter) {
  std::mt19937 random(5);
  for (int draw = 0; draw < 200; ++draw) {
    const size_t ranks = 1 + random() % 7;
    std::vector<int64_t> loads(ranks, 0);
    std::vector<int64_t> before = loads;
    for (int unit = 0; unit < 3; ++unit) {
      std::vector<int64_t> sizes(1 + random() % 9);
      int64_t sum = 0;
      for (int64_t& size : sizes) sum += size = static_cast<int64_t>(random() % 700);
      const Flat flat = whole_of(sizes, loads);
      const int64_t shard = flat.numel / static_cast<int64_t>(ranks);
      EXPECT_EQ(flat.numel, shard * static_cast<int64_t>(ranks));
      EXPECT_EQ(shard % 128, 0);
      int64_t end = 0;
      std::set<std::string> names;
      for (const Slot& slot : flat.slots) {
        EXPECT_GE(slot.offset, end);  // in order, without overlap
        EXPECT_EQ(slot.offset % 16, 0);
        end = slot.offset + slot.numel;
        names.insert(slot.name);
        const int64_t last = std::max(slot.offset, end - 1);
        EXPECT_EQ(slot.offset / shard, last / shard);
      }
      EXPECT_LE(end, flat.numel);
      EXPECT_EQ(names.size(), sizes.size());
      const int64_t added = std::accumulate(loads.begin(), loads.end(), int64_t{0}) -
                            std::accumulate(before.begin(), before.end(), int64_t{0});
      EXPECT_EQ(added, sum);
      before = loads;
    }
  }
}

TEST(Flat, TheWholeLayoutBalancesRanks) {
  std::vector<int64_t> loads(2, 0);
  EXPECT_EQ(whole_of({400, 300, 200, 100}, loads).numel, 2 * 512);
  EXPECT_EQ(loads, (std::vector<int64_t>{500, 500}));
  loads.assign(4, 0);  // one matrix at a time: the ranks take turns
  for (int unit = 0; unit < 8; ++unit) whole_of({256}, loads);
  EXPECT_EQ(loads, (std::vector<int64_t>(4, 512)));
}

// The ratios of docs/training.md: bytes with this layout to bytes of equal shards.
TEST(Flat, TheWholeLayoutOfALlamaBlock) {
  for (const auto& [ranks, ratio] : {std::pair{2, 1.06}, {4, 1.22}, {8, 1.78}, {16, 3.56}}) {
    Flat flat(Dtype::kBf16, true);
    int64_t sum = 0;
    for (const int64_t width : {4096, 4096, 4096, 4096, 11008, 11008, 11008}) {
      flat.add(slot_of("p", at::zeros({1}).expand({4096 * width})), "u");
      sum += 4096 * width;
    }
    std::vector<int64_t> loads(static_cast<size_t>(ranks), 0);
    flat.seal_whole(ranks, loads);
    EXPECT_NEAR(static_cast<double>(flat.numel) / static_cast<double>(sum), ratio, 0.005) << ranks;
  }
}

TEST(Flat, EachRankOfAGroupHasAnEqualPartOfAShard) {
  Flat flat(Dtype::kFp32, true);
  flat.add(slot_of("p", at::zeros({130})), "u");
  std::vector<int64_t> loads(2, 0);
  flat.seal_whole(6, loads);
  EXPECT_EQ(flat.numel, 2 * 3 * 128);
}

TEST(Flat, WhatNothingWasWrittenToIsZeroed) {
  mem::Pool pool;
  mem::Arena arena(pool);
  Flat flat(Dtype::kFp32, true);
  for (const int n : {3, 20, 4}) flat.add(slot_of("p", at::arange(n, at::kFloat).clone()), "u");
  flat.seal(1);
  Buffer sum;
  sum.numel = flat.numel;
  sum.memory = arena.take(flat.numel * 4, mem::Account::kGrad);
  std::memset(sum.data().host(), 1, flat.numel * 4);
  flat.slots[1].written = true;
  flat.complete(sum);
  const char* data = sum.data().host();
  for (int64_t i = 0; i < flat.numel; ++i) {
    const bool kept = i >= flat.slots[1].offset && i < flat.slots[1].offset + 20;
    EXPECT_EQ(data[i * 4], kept ? 1 : 0) << i;
  }
}

}  // namespace
}  // namespace penstock::exec
