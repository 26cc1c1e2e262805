#include "src/mem/arena.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "penstock/error.h"

namespace penstock::mem {
namespace {

std::string refusal(Arena& arena, int64_t bytes) {
  try {
    arena.take(bytes, Account::kParam);
  } catch (const RuntimeFault& fault) {
    return fault.what();
  }
  return "";
}

TEST(Arena, ReusesBuffersOfEqualSizeAndCountsEveryByte) {
  Pool pool;
  Arena arena(pool);
  char* first = nullptr;
  {
    Lease a = arena.take(4096, Account::kParam);
    const Lease b = arena.take(100, Account::kGrad);
    first = a.data().host();
    EXPECT_EQ(arena.usage().total_now, 4196);
    Lease moved = std::move(a);
    EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): moved-from leases are empty
    EXPECT_EQ(moved.data().host(), first);
  }
  EXPECT_EQ(arena.usage().total_now, 0);
  EXPECT_EQ(arena.usage().total_peak, 4196);
  EXPECT_EQ(arena.usage().peak[static_cast<size_t>(Account::kGrad)], 100);
  EXPECT_EQ(arena.take(4096, Account::kOptim).data().host(), first);
  arena.reset_peak();
  EXPECT_EQ(arena.usage().total_peak, 0);
}

TEST(Arena, HoldsNoMoreThanItsPeak) {
  Pool pool;
  Arena arena(pool);
  {
    const Lease a = arena.take(3000, Account::kParam);
    const Lease b = arena.take(2000, Account::kParam);
  }
  EXPECT_EQ(arena.usage().held, 5000);
  // The 3000 + 2000 unused bytes do not fit beside the new 2500.
  const Lease c = arena.take(2500, Account::kGrad);
  EXPECT_EQ(arena.usage().held, 4500);
  const Lease d = arena.take(2000, Account::kGrad);
  EXPECT_EQ(arena.usage().held, 4500);
  EXPECT_EQ(arena.usage().total_peak, 5000);
  arena.trim();
  EXPECT_EQ(arena.usage().held, 4500);
}

TEST(Arena, RefusesWhatIsOverItsBudget) {
  Pool pool;
  Arena arena(pool);
  arena.set_budget({4096, "device memory (memory.device_bytes)", [] { return "offload more"; }});
  Lease held = arena.take(3072, Account::kParam);
  EXPECT_EQ(refusal(arena, 1024), "");  // taken and given back
  EXPECT_EQ(refusal(arena, 1025),
            "[mem::Arena::take] device memory (memory.device_bytes): the 3.00 KiB in use on this "
            "rank plus 1.00 KiB more is over the 4.00 KiB allowed; offload more");
  EXPECT_EQ(arena.usage().total_now, 3072);
  held.reset();
  EXPECT_EQ(refusal(arena, 4096), "");
}

TEST(Arena, ArenasOfOnePoolShareItsBudgetAndItsBuffers) {
  Pool pool;
  Arena device(pool), host(pool);
  pool.set_budget({5000, "memory", {}});
  const char* first = nullptr;
  {
    const Lease a = device.take(3000, Account::kParam);
    first = a.data().host();
    const Lease b = host.take(2000, Account::kOptim);
    EXPECT_NE(refusal(host, 1), "");
    EXPECT_NE(refusal(device, 1), "");
  }
  const Lease c = host.take(3000, Account::kOptim);
  EXPECT_EQ(c.data().host(), first);
  const Lease d = host.take(1500, Account::kOptim);
  EXPECT_EQ(host.usage().held, 4500);  // not 6500: the 2000 unused went back to the system
  EXPECT_EQ(device.usage().total_now, 0);
  EXPECT_EQ(host.usage().total_now, 4500);
}

TEST(Arena, LargeBuffersStandInForNearlyEqualOnes) {
  Pool pool;
  Arena arena(pool);
  constexpr int64_t kMiB = 1 << 20;
  Lease first = arena.take(16 * kMiB + 4096, Account::kOptim);
  const char* address = first.data().host();
  first.reset();
  first = arena.take(17 * kMiB, Account::kOptim);
  EXPECT_EQ(first.data().host(), address);
  EXPECT_EQ(arena.usage().total_now, 17 * kMiB) << "the requested bytes count";
  first.reset();
  EXPECT_EQ(pool.held(), 17 * kMiB);
  const Lease other = arena.take(15 * kMiB, Account::kOptim);
  EXPECT_EQ(pool.held(), 15 * kMiB) << "the unused buffer of another size is freed";
}

}  // namespace
}  // namespace penstock::mem
