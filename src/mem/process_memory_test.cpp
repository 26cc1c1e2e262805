#include "src/mem/process_memory.h"

#include <malloc.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace penstock::mem {
namespace {

TEST(ProcessMemory, TouchedPagesOfTheHeapAreCounted) {
  constexpr int64_t kBytes = 64 << 20;
  const ProcessMemory before = process_memory();
  const std::vector<char> values(kBytes, 1);
  const ProcessMemory after = process_memory();
  EXPECT_GE(after.process - before.process, kBytes / 2) << values.front();
  EXPECT_GT(after.libraries, 0);
  EXPECT_LT(after.libraries, after.process);
}

TEST(ProcessMemory, FreedMemoryCountsUntilMallocReturnsIt) {
#ifndef __GLIBC__
  GTEST_SKIP() << "only glibc reports its heap";
#endif
  constexpr int64_t kBlock = 64 << 10, kBlocks = 512;  // 32 MiB, below malloc's limit for mappings
  std::vector<std::unique_ptr<char[]>> blocks;
  for (int64_t i = 0; i < kBlocks; ++i) {
    blocks.push_back(std::make_unique<char[]>(kBlock));  // zeroed, so its pages are resident
  }
  // The last block keeps the freed ones below it in the heap.
  const auto last = std::make_unique<char[]>(kBlock);
  malloc_trim(0);
  const int64_t before = process_memory().heap_free;
  blocks.clear();
  const int64_t kept = process_memory().heap_free;
  EXPECT_NEAR(static_cast<double>(kept - before), kBlock * kBlocks, 1 << 20);
  malloc_trim(0);
  EXPECT_LT(process_memory().heap_free - before, 1 << 20) << last[0];
}

}  // namespace
}  // namespace penstock::mem
