#include "src/mem/available_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "penstock/error.h"

namespace penstock::mem {
namespace {

namespace fs = std::filesystem;

// Files of a simulated system.
class FoundTest : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(root_);
    write({{"proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    1000 kB\n"}});
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::map<std::string, std::string>& files) const {
    for (const auto& [path, text] : files) {
      fs::create_directories((root_ / path).parent_path());
      std::ofstream(root_ / path) << text;
    }
  }
  int64_t found() const { return free_host_bytes(root_.string()); }

  const fs::path root_ = fs::path(testing::TempDir()) / "penstock_found_test";
};

TEST_F(FoundTest, WithoutGroupsWhatIsAvailable) { EXPECT_EQ(found(), 1000 * 1024); }

TEST_F(FoundTest, TheTightestGroupOfVersion2) {
  write({{"proc/self/cgroup", "0::/outer/inner\n"},
         {"sys/fs/cgroup/outer/inner/memory.max", "max\n"},
         {"sys/fs/cgroup/outer/inner/memory.current", "5000\n"},
         {"sys/fs/cgroup/outer/memory.max", "60000\n"},
         {"sys/fs/cgroup/outer/memory.current", "50000\n"},
         {"sys/fs/cgroup/outer/memory.stat", "anon 7\nactive_file 9\ninactive_file 3000\n"}});
  EXPECT_EQ(found(), 60000 - 50000 + 3000);
}

TEST_F(FoundTest, GroupsOfVersion1SeenFromInsideAContainer) {
  write({{"proc/self/cgroup", "9:cpu:/x\n4:memory:/not/mounted/here\n0::/\n"},
         {"sys/fs/cgroup/memory/memory.limit_in_bytes", "4096"},
         {"sys/fs/cgroup/memory/memory.usage_in_bytes", "1024"}});
  EXPECT_EQ(found(), 3072);
}

TEST_F(FoundTest, AGroupThatIsOverItsLimitLeavesNothing) {
  write({{"proc/self/cgroup", "0::/\n"},
         {"sys/fs/cgroup/memory.max", "10\n"},
         {"sys/fs/cgroup/memory.current", "20\n"}});
  EXPECT_EQ(found(), 0);
}

TEST_F(FoundTest, NoSuchFilesIsAnError) {
  EXPECT_THROW(free_host_bytes((root_ / "nothing").string()), RuntimeFault);
}

TEST_F(FoundTest, ThisMachineHasSome) {
  EXPECT_GT(free_host_bytes(), 1 << 20);
  const std::string folder = root_.string();
  EXPECT_GT(free_disk_bytes({folder}), 0);
  EXPECT_EQ(free_disk_bytes({"/no/such/folder"}), 0);
  // The numbers may differ, because other processes write to the disk meanwhile.
  EXPECT_LT(free_disk_bytes({folder, folder}), free_disk_bytes({folder}) * 3 / 2);
}

}  // namespace
}  // namespace penstock::mem
