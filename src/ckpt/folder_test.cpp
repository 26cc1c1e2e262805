#include "src/ckpt/folder.h"

#include <sys/wait.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "penstock/error.h"

namespace penstock::ckpt {
namespace {

namespace fs = std::filesystem;

class FolderTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "penstock-ckpt-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  void save(const std::string& tag, int keep = 0) const {
    Draft draft(root_, tag);
    write_text(draft.path() + "/" + kManifest, tag);
    draft.commit(keep);
  }
  int num_entries() const {
    return static_cast<int>(std::distance(fs::directory_iterator(root_), {}));
  }

  std::string root_;
};

TEST_F(FolderTest, ADraftIsSeenWhenItIsCommitted) {
  {
    Draft draft(root_, "one");
    write_text(draft.path() + "/" + kManifest, "text");
    EXPECT_TRUE(tags(root_).empty());
    EXPECT_EQ(draft.commit(0), root_ + "/one");
  }
  EXPECT_EQ(tags(root_), std::vector<std::string>{"one"});
  EXPECT_EQ(read_text(root_ + "/latest"), "one\n");
  EXPECT_EQ(num_entries(), 2);
}

TEST_F(FolderTest, OneThatIsNotCommittedGoes) {
  {
    Draft draft(root_, "one");
  }
  EXPECT_EQ(num_entries(), 0);
}

TEST_F(FolderTest, LatestIsFirstAndThenTheNewest) {
  for (const char* tag : {"a", "b", "c"}) save(tag);
  EXPECT_EQ(tags(root_), (std::vector<std::string>{"c", "b", "a"}));
  write_text(root_ + "/latest", "a");
  EXPECT_EQ(tags(root_), (std::vector<std::string>{"a", "c", "b"}));
  write_text(root_ + "/latest", "gone");
  EXPECT_EQ(tags(root_), (std::vector<std::string>{"c", "b", "a"}));
}

TEST_F(FolderTest, ATagIsReplacedAsAWhole) {
  save("a");
  std::ofstream(root_ + "/a/extra") << "old";
  save("a");
  EXPECT_FALSE(exists(root_ + "/a/extra"));
  EXPECT_EQ(num_entries(), 2);
}

TEST_F(FolderTest, OfStepsTheLastAreKept) {
  for (const char* tag : {"best", "step-1", "step-2", "step-3"}) save(tag, 2);
  EXPECT_EQ(tags(root_), (std::vector<std::string>{"step-3", "step-2", "best"}));
  EXPECT_EQ(num_entries(), 4);
}

TEST_F(FolderTest, WhatIsNoCheckpointIsNotReplaced) {
  std::filesystem::create_directories(root_ + "/logs");
  write_text(root_ + "/logs/precious", "text");
  EXPECT_THROW(Draft(root_, "logs"), RuntimeFault);
  EXPECT_EQ(read_text(root_ + "/logs/precious"), "text");
}

TEST_F(FolderTest, WhatADeadWriterLeftGoesAndALivingOneStays) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Draft* left = new Draft(root_, "dead");  // NOLINT: as a kill would
    write_text(left->path() + "/shard", "bytes");
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(num_entries(), 1);
  auto living = std::make_unique<Draft>(root_, "living");
  EXPECT_EQ(num_entries(), 1);
  save("other");
  EXPECT_TRUE(exists(living->path()));
  write_text(living->path() + "/" + kManifest, "text");
  living->commit(0);
  EXPECT_EQ(tags(root_).size(), 2U);
}

TEST_F(FolderTest, WhatWasReplacedOrIsNotKeptGoesWithTheNextSave) {
  std::filesystem::create_directories(root_ + "/.a.saving-old");
  std::filesystem::create_directories(root_ + "/.b.saving-12ab");
  write_text(root_ + "/.b.saving-12ab/" + kManifest, "of a checkpoint that was replaced");
  // Its writer may just be starting.
  std::filesystem::create_directories(root_ + "/.c.saving-34cd");
  save("d");
  EXPECT_FALSE(exists(root_ + "/.a.saving-old"));
  EXPECT_FALSE(exists(root_ + "/.b.saving-12ab"));
  EXPECT_TRUE(exists(root_ + "/.c.saving-34cd"));
}

TEST_F(FolderTest, NamesThatLeadAwayAreNoTags) {
  for (const char* tag : {"", ".", "..", ".a", "a/b", "/a", "latest", "a\nb"}) {
    EXPECT_FALSE(is_tag(tag)) << tag;
  }
  for (const char* tag : {"a", "step-1", "best model", "é"}) EXPECT_TRUE(is_tag(tag)) << tag;
}

TEST_F(FolderTest, NoFolderHasNoTags) { EXPECT_TRUE(tags(root_ + "/none").empty()); }

}  // namespace
}  // namespace penstock::ckpt
