#include "src/activations/activations.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <thread>

#include "penstock/error.h"

namespace penstock::activations {
namespace {

using Fetch = std::function<at::Tensor()>;

class ActivationsTest : public testing::TestWithParam<Tier> {
 protected:
  ActivationsTest() : acts_(std::in_place, GetParam()) {
    mem::DiskOptions options;
    options.paths = {std::filesystem::temp_directory_path()};
    if (GetParam() == Tier::kDisk) acts_->open_disk(options);
    acts_->begin_forward();
  }
  Fetch put(int unit, const at::Tensor& tensor) {
    Fetch fetch = acts_->save(unit, tensor);
    acts_->put_away(unit, "unit");
    return fetch;
  }
  std::optional<Activations> acts_;
};

// A disk that hangs: writes end at once; reads fill their memory when the gate opens.
class HeldReads final : public mem::BlockIo {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
    int passed = 0;

    void open_and_wait_for_one() {
      std::unique_lock lock(mutex);
      open = true;
      changed.notify_all();
      changed.wait(lock, [this] { return passed > 0; });
    }
  };
  explicit HeldReads(Gate& gate) : gate_(gate) {}
  ~HeldReads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void submit(mem::BlockRequest request) override {
    threads_.emplace_back([this, request = std::move(request)] {
      if (!request.write) {
        std::unique_lock lock(gate_.mutex);
        gate_.changed.wait(lock, [this] { return gate_.open; });
        std::memset(request.data, 0x7f, static_cast<size_t>(request.bytes));
        ++gate_.passed;
        gate_.changed.notify_all();
      }
      request.done(request.bytes);
    });
  }
  const char* name() const override { return "held"; }

 private:
  Gate& gate_;
  std::vector<std::thread> threads_;
};

TEST(Activations, WhatAHangingReadMayStillFillIsNotUsedAgain) {
  HeldReads::Gate gate;
  mem::DiskOptions options;
  options.paths = {std::filesystem::temp_directory_path()};
  options.stall_s = 2.0;
  options.make_io = [&] { return std::make_unique<HeldReads>(gate); };
  Activations acts(Tier::kDisk);
  acts.open_disk(options);
  const auto put = [&](int unit, const at::Tensor& tensor) {
    acts.begin_forward();
    Fetch fetch = acts.save(unit, tensor);
    acts.put_away(unit, "unit");
    return fetch;
  };
  Fetch hangs = put(1, at::ones({1 << 16}));
  put(2, at::ones({1 << 16}));  // the first write has ended
  EXPECT_THROW(hangs(), RuntimeFault);
  hangs = {};  // frees the graph
  const at::Tensor kept = at::ones({1 << 16});
  const Fetch later = put(3, kept);
  acts.bring(3);
  gate.open_and_wait_for_one();
  EXPECT_TRUE(at::equal(later(), kept));
}

INSTANTIATE_TEST_SUITE_P(Tiers, ActivationsTest, testing::Values(Tier::kHost, Tier::kDisk),
                         [](const auto& info) { return tier_name(info.param); });

TEST_P(ActivationsTest, ValuesAndStridesComeBackWhateverTheViewIs) {
  const at::Tensor base = at::randn({64, 65, 3});
  const at::Tensor tensors[] = {
      base,
      base.to(at::kBFloat16),
      base.to(at::kDouble),
      at::arange(5000),
      base > 0,
      base.transpose(0, 2),
      base.slice(0, 3, 60),
      base.slice(2, 1, 2),
      base.slice(1, 1, 60, 7).transpose(0, 1),
      base.select(2, 0).unsqueeze(1).expand({64, 20, 65}),
      base.slice(0, 1).unfold(1, 5, 2),
      at::ones({3}),
      at::ones({}),
      at::ones({0, 4}),
      base.to(at::kComplexFloat),
  };
  for (size_t i = 0; i < std::size(tensors); ++i) {
    const at::Tensor before = tensors[i].clone();
    const Fetch fetch = put(static_cast<int>(i), tensors[i]);
    EXPECT_EQ(acts_->shelf().live_bytes() > 0, tensors[i].nbytes() >= 4096) << i;
    for (int again = 0; again < 2; ++again) {
      if (again == 1) acts_->bring(static_cast<int>(i));
      const at::Tensor back = fetch();
      EXPECT_TRUE(at::equal(back, before)) << i;
      EXPECT_EQ(back.strides(), tensors[i].strides()) << i;
      EXPECT_EQ(back.dtype(), tensors[i].dtype()) << i;
      if (back.numel() > 0) {
        const auto at = [](const at::Tensor& t) {
          return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 64;
        };
        EXPECT_EQ(at(back), at(tensors[i])) << i;
        if (!back.is_non_overlapping_and_dense()) continue;
        back.fill_(7);  // a separate copy
      }
    }
  }
  EXPECT_EQ(acts_->shelf().live_bytes(), 0);
}

TEST_P(ActivationsTest, NothingHoldsTheTensorItself) {
  at::Tensor input = at::randn({4096});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage = input.storage().getWeakStorageImpl();
  const Fetch fetch = put(1, input);
  const at::Tensor copy = input.clone();
  input.reset();
  EXPECT_TRUE(storage.expired());
  EXPECT_TRUE(at::equal(fetch(), copy));
}

TEST_P(ActivationsTest, MemoryHoldsOneUnitOnItsWayToDisk) {
  std::vector<Fetch> fetches;
  const int64_t bytes = 1 << 20;
  for (int unit = 0; unit < 8; ++unit) fetches.push_back(put(unit, at::randn({bytes / 4})));
  const int64_t in_memory = GetParam() == Tier::kDisk ? 1 : 8;
  EXPECT_EQ(acts_->shelf().peak_bytes(), in_memory * bytes);
  EXPECT_EQ(acts_->shelf().disk_bytes(), GetParam() == Tier::kDisk ? 8 * bytes : 0);
  for (int unit = 8; unit-- > 0;) {
    acts_->bring(unit - 1);  // one unit ahead
    fetches[unit]();
    fetches.pop_back();
  }
  EXPECT_EQ(acts_->shelf().peak_bytes(), std::max<int64_t>(2, in_memory) * bytes);
  EXPECT_EQ(acts_->shelf().live_bytes(), 0);
  fetches.push_back(put(0, at::randn({bytes / 4})));
  EXPECT_EQ(acts_->shelf().disk_bytes(), GetParam() == Tier::kDisk ? 8 * bytes : 0) << "grew again";
}

TEST_P(ActivationsTest, WhatUnitsShareIsKeptOnceInAForward) {
  at::Tensor mask = at::randn({4096});
  const Fetch a = put(1, mask), b = put(2, mask), c = put(3, mask.view({64, 64}));
  EXPECT_TRUE(at::equal(a(), mask));  // also frees the loaded copy
  const int64_t once = acts_->shelf().live_bytes();
  EXPECT_EQ(once, 4096 * 4);
  const at::Tensor pieces[] = {mask.slice(0, 1000, 3000), mask.slice(0, 1, 4000, 2),
                               mask.view({64, 64}).t().slice(0, 3)};
  for (const at::Tensor& piece : pieces) {
    EXPECT_TRUE(at::equal(put(4, piece)(), piece));
    EXPECT_EQ(acts_->shelf().live_bytes(), once);
  }
  const at::Tensor before = mask.clone();
  mask.mul_(2);
  const Fetch changed = put(5, mask);
  for (const Fetch& fetch : {a, b, c}) EXPECT_TRUE(at::equal(fetch().view(-1), before));
  EXPECT_TRUE(at::equal(changed(), mask));
  const int64_t bytes = acts_->shelf().live_bytes();
  acts_->begin_forward();  // a buffer that is refilled for each forward may change here
  const Fetch later = put(1, mask);
  EXPECT_GT(acts_->shelf().live_bytes(), bytes);
}

TEST_P(ActivationsTest, AnotherTensorAtTheSameAddressIsAnother) {
  std::optional<at::Tensor> first = at::ones({4096});
  const Fetch kept = put(1, *first);
  first.reset();
  std::vector<at::Tensor> others;
  for (int i = 0; i < 100; ++i) {
    others.push_back(at::randn({4096}));
    EXPECT_TRUE(at::equal(put(2, others.back())(), others.back()));
  }
  EXPECT_TRUE(at::equal(kept(), at::ones({4096})));
}

TEST_P(ActivationsTest, InPlaceChangesAreRefusedUntilItIsPutAway) {
  at::Tensor input = at::randn({4096});
  const Fetch early = acts_->save(1, input);
  EXPECT_TRUE(at::equal(early(), input)) << "before put_away()";
  input.add_(1);
  EXPECT_THROW(early(), RuntimeFault);
  try {
    acts_->put_away(1, "blocks.0");
    FAIL();
  } catch (const RuntimeFault& error) {
    EXPECT_NE(std::string(error.what()).find("blocks.0 was changed in place"), std::string::npos)
        << error.what();
  }
  const at::Tensor before = input.clone();
  const Fetch late = put(1, input);
  input.add_(1);
  EXPECT_TRUE(at::equal(late(), before));
}

TEST_P(ActivationsTest, ParametersStayWhereTheyAre) {
  const at::Tensor weight = at::randn({4096}).requires_grad_();
  const Fetch fetch = put(1, weight);
  EXPECT_EQ(acts_->shelf().live_bytes(), 0);
  EXPECT_TRUE(fetch().is_same(weight));
  const at::NoGradGuard no_grad;
  weight.add_(1);
  EXPECT_THROW(fetch(), RuntimeFault);
}

TEST_P(ActivationsTest, BringsTheLastForwardThatIsStillWanted) {
  const at::Tensor one = at::randn({4096}), other = at::randn({4096});
  const Fetch first = put(1, one);
  std::optional<Fetch> second = put(1, other);
  acts_->bring(1);
  EXPECT_TRUE(at::equal((*second)(), other));
  second.reset();
  acts_->bring(1);
  acts_->bring(2);  // unit 2 has nothing saved
  EXPECT_TRUE(at::equal(first(), one));
}

TEST_P(ActivationsTest, MayBeLetGoOnAnyThreadAndAfterTheEngine) {
  Fetch lost = put(1, at::randn({1 << 20}));
  acts_->bring(1);
  std::thread([gone = std::exchange(lost, {})]() mutable { gone = {}; }).join();
  EXPECT_EQ(acts_->shelf().live_bytes(), 0);
  Fetch kept = put(2, at::randn({4096})), pending = acts_->save(3, at::randn({4096}));
  acts_->close();
  EXPECT_EQ(acts_->shelf().live_bytes(), 0);
  acts_.reset();
  EXPECT_THROW(kept(), RuntimeFault);
  EXPECT_THROW(pending(), RuntimeFault);
}

}  // namespace
}  // namespace penstock::activations
