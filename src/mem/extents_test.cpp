#include "src/mem/extents.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <random>

#include "penstock/error.h"

namespace penstock::mem {
namespace {

DiskOptions options() {
  DiskOptions options;
  options.paths = {std::filesystem::temp_directory_path()};
  return options;
}

TEST(Extents, NeverOverlapAndAreUsedAgain) {
  Extents extents(options());
  std::map<int64_t, int64_t> taken;  // offset -> bytes
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    if (taken.empty() || random() % 2 == 0) {
      const int64_t bytes = 1 + random() % 20000;
      const int64_t offset = extents.take(bytes);
      const auto after = taken.lower_bound(offset);
      if (after != taken.end()) {
        EXPECT_LE(offset + bytes, after->first);
      }
      if (after != taken.begin()) {
        const auto before = std::prev(after);
        EXPECT_LE(before->first + before->second, offset);
      }
      taken[offset] = bytes;
    } else {
      const auto chosen = std::next(taken.begin(), random() % taken.size());
      extents.give_back(chosen->first, chosen->second);
      taken.erase(chosen);
    }
  }
  for (const auto& [offset, bytes] : taken) extents.give_back(offset, bytes);
  EXPECT_EQ(extents.bytes_in_use(), 0);
  // All returned extents are merged into one.
  const int64_t reserved = extents.disk().reserved();
  EXPECT_EQ(extents.take(reserved), 0);
  EXPECT_EQ(extents.disk().reserved(), reserved);
}

TEST(Extents, AFullDiskIsAnErrorAndNothingIsLost) {
  Extents extents(options());
  const int64_t first = extents.take(8192);
  for (int again = 0; again < 2; ++again) {
    try {
      extents.take(int64_t{1} << 60);
      FAIL();
    } catch (const RuntimeFault& error) {
      EXPECT_NE(std::string(error.what()).find(options().paths[0]), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("cannot hold"), std::string::npos);
    }
    EXPECT_NO_THROW(extents.give_back(extents.take(4096), 4096)) << "a smaller extent still fits";
  }
  EXPECT_EQ(extents.bytes_in_use(), 8192);
  extents.give_back(first, 8192);
  EXPECT_EQ(extents.bytes_in_use(), 0);
}

}  // namespace
}  // namespace penstock::mem
