#include "src/ckpt/shard.h"

#include <sys/resource.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "src/ckpt/damaged.h"
#include "src/ckpt/folder.h"

namespace penstock::ckpt {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFirstBytes = 10'000, kSecondBytes = 12;

struct Aligned {
  explicit Aligned(int64_t bytes)
      : data(static_cast<char*>(std::aligned_alloc(4096, mem::block_padded(bytes)))) {
    for (int64_t i = 0; i < mem::block_padded(bytes); ++i) {
      data[i] = i < bytes ? static_cast<char>(i * 7 + i / 251) : '\0';
    }
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  char* data;
};

class ShardTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "penstock-shard-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    // 2,000 elements of `a`, a gap, 400 of `b`; and 12 bytes of `c`.
    regions_ = {{kFirstBytes, {{0, 500, 2'000, 0}, {1, 0, 400, 8'064}}},
                {kSecondBytes, {{2, 0, 12, 0}}}};
    tensors_ = {{"param", "a", -1, {50, 100}, "F32", {}},
                {"param", "b", -1, {400}, "F32", {}},
                {"rng", "c", 0, {12}, "U8", {}}};
    layout_ = lay_out(regions_, tensors_);
    layout_.file.name = "rank-0.safetensors";
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string path() const { return root_ + "/" + layout_.file.name; }
  void write() {
    const Aligned first(kFirstBytes), second(kSecondBytes);
    ShardWriter writer(path(), layout_);
    writer.write(regions_[1].offset, second.data, mem::block_padded(kSecondBytes), 1);
    writer.write(regions_[0].offset, first.data, mem::block_padded(kFirstBytes), 0);
    layout_.file.checksum = writer.finish();
    manifest_.files = {layout_.file};
    manifest_.tensors = tensors_;
  }
  void flip(int64_t at) const {
    std::fstream file(path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 4);
    file.seekp(at);
    file.put(byte);
  }

  std::string root_;
  std::vector<Region> regions_;
  std::vector<Tensor> tensors_;
  ShardLayout layout_;
  Manifest manifest_;
};

TEST_F(ShardTest, WhatWasWrittenIsRead) {
  write();
  EXPECT_EQ(fs::file_size(path()), static_cast<uintmax_t>(layout_.file.bytes));
  ShardReader reader(root_, layout_.file);
  reader.verify(manifest_, 0);
  const Slice& slice = tensors_[1].slices.front();
  std::vector<char> values(1'600);
  ShardReader(root_, layout_.file).read(slice.offset, 1'600, values.data());
  const Aligned first(kFirstBytes);
  EXPECT_EQ(std::memcmp(values.data(), first.data + 8'064, 1'600), 0);
}

TEST_F(ShardTest, AFewBytesTakeAFewGranules) {
  write();
  ShardReader reader(root_, layout_.file);
  char byte = 0;
  reader.read(regions_[0].offset + 700, 1, &byte);
  const int64_t checksums = layout_.file.bytes - layout_.file.table;  // all of them, once
  EXPECT_EQ(reader.bytes_read(), checksums + 512);
  reader.read(regions_[0].offset + 900, 1, &byte);  // in the same granule
  EXPECT_EQ(reader.bytes_read(), checksums + 512);
}

TEST_F(ShardTest, EveryFlippedByteIsSeen) {
  write();
  for (int64_t at = 0; at < layout_.file.bytes; at += at < 8 || at > 200 ? 97 : 1) {
    flip(at);
    bool seen = false;
    try {
      ShardReader(root_, layout_.file).verify(manifest_, 0);
    } catch (const Damaged&) {
      seen = true;
    }
    EXPECT_TRUE(seen) << at;
    flip(at);
  }
  ShardReader(root_, layout_.file).verify(manifest_, 0);
}

TEST_F(ShardTest, AnotherSizeOrNoFileIsSeenAtOnce) {
  write();
  fs::resize_file(path(), layout_.file.bytes - 1);
  EXPECT_THROW(ShardReader(root_, layout_.file), Damaged);
  fs::remove(path());
  EXPECT_THROW(ShardReader(root_, layout_.file), Damaged);
}

TEST_F(ShardTest, AFullDiskIsNamedAndLeavesNothing) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::string error;
  try {
    const ShardWriter writer(path(), layout_);
  } catch (const RuntimeFault& fault) {
    error = fault.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(error.find(path()), std::string::npos) << error;
  EXPECT_NE(error.find("wanted"), std::string::npos) << error;
  EXPECT_FALSE(exists(path()));
}

}  // namespace
}  // namespace penstock::ckpt
