#include "src/mem/swap_file.h"

#include <sys/resource.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::mem {
namespace {

namespace fs = std::filesystem;

class SwapFileTest : public testing::Test {
 protected:
  SwapFileTest() {
    std::string name = (fs::temp_directory_path() / "penstock-test-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~SwapFileTest() override { fs::remove_all(folder_); }
  std::string folder_;
};

std::string target(const SwapFile& file) {
  return fs::read_symlink(concat("/proc/self/fd/", file.descriptor())).string();
}

TEST_F(SwapFileTest, HasNoNameWhicheverWayItIsMade) {
  for (SwapFile (*make)(const std::string&) : {&SwapFile::nameless, &SwapFile::named}) {
    const SwapFile file = make(folder_);
    if (!file.is_open()) continue;  // this file system has no nameless files
    EXPECT_NO_THROW(file.claim(0, 1 << 20));
    EXPECT_TRUE(fs::is_empty(folder_));
  }
}

TEST_F(SwapFileTest, NeverHadANameWhereThatCanBe) {
  const bool can = SwapFile::nameless(folder_).is_open();
  const SwapFile file = SwapFile::open(folder_);
  EXPECT_EQ(target(file).find("penstock-swap") == std::string::npos, can) << target(file);
}

TEST_F(SwapFileTest, GivesItsDescriptorBack) {
  int descriptor = -1;
  {
    SwapFile first = SwapFile::open(folder_);
    const SwapFile second = std::move(first);
    descriptor = second.descriptor();
    EXPECT_FALSE(first.is_open());  // NOLINT(bugprone-use-after-move): it is defined
  }
  EXPECT_FALSE(fs::exists(concat("/proc/self/fd/", descriptor)));
}

TEST_F(SwapFileTest, AClaimThatCannotBeMetSaysWhereAndHowMuch) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  struct Case {
    int64_t bytes;
    rlim_t limit;
    const char* says;
  };
  const Case cases[] = {{int64_t{1} << 50, before.rlim_cur, "1024.00 TiB ("},
                        {1 << 20, 1 << 16, "1.00 MiB ("},
                        {1 << 20, 1 << 16, "File too large"}};
  for (const Case& c : cases) {
    const SwapFile file = SwapFile::open(folder_);
    const rlimit limit{c.limit, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    std::string error;
    try {
      file.claim(0, c.bytes);
    } catch (const RuntimeFault& fault) {
      error = fault.what();
    }
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_NE(error.find(c.says), std::string::npos) << error;
    EXPECT_NE(error.find(folder_), std::string::npos) << error;
    EXPECT_NE(error.find("free"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace penstock::mem
