#include "src/mem/process_memory.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace penstock::mem
