#include "src/mem/disk.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "penstock/error.h"

namespace penstock::mem {
namespace {

// Aligned memory with a pattern of `seed`.
class Block {
 public:
  explicit Block(int64_t bytes, int seed = 0) : bytes_(block_padded(bytes)) {
    data_ = static_cast<char*>(std::aligned_alloc(kBlockBytes, static_cast<size_t>(bytes_)));
    for (int64_t i = 0; i < bytes_; ++i) data_[i] = static_cast<char>(i * 7 + i / 4096 + seed);
  }
  ~Block() { std::free(data_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  char* data() { return data_; }
  bool equals(const Block& other) const { return std::memcmp(data_, other.data_, bytes_) == 0; }

 private:
  int64_t bytes_;
  char* data_;
};

class DiskTest : public testing::Test {
 protected:
  DiskTest() {
    std::string name = (std::filesystem::temp_directory_path() / "penstock-test-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~DiskTest() override {
    EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "a swap file was left";
    std::filesystem::remove_all(folder_);
  }
  DiskOptions options(int num_paths = 1) const {
    DiskOptions options;
    options.paths.assign(num_paths, folder_);
    options.stripe_bytes = 16 * kBlockBytes;
    options.checksums = true;
    return options;
  }
  std::string folder_;
};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const RuntimeFault& error) {
    return error.what();
  }
  return "";
}

TEST_F(DiskTest, GivesBackWhatWasWrittenWhateverTheSize) {
  for (const bool uring : {true, false}) {
    for (const int num_paths : {1, 3}) {
      DiskOptions opened = options(num_paths);
      opened.make_io = [uring] {
        std::unique_ptr<BlockIo> io = uring ? BlockIo::uring(8) : nullptr;
        return io ? std::move(io) : BlockIo::threads(3);
      };
      Disk disk(opened);
      EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "the file has a name";
      const int64_t sizes[] = {1, 4096, 70000, 3 << 20, 12345};
      int64_t offsets[5];
      for (int i = 0; i < 5; ++i) offsets[i] = disk.reserve(sizes[i]);
      disk.allocate();
      std::vector<DiskTicket> tickets;
      std::vector<std::unique_ptr<Block>> blocks;
      for (int i = 0; i < 5; ++i) {
        blocks.push_back(std::make_unique<Block>(sizes[i], i));
        tickets.push_back(disk.write(offsets[i], blocks.back()->data(), sizes[i]));
      }
      for (const DiskTicket& ticket : tickets) disk.wait(ticket);
      for (int i = 4; i >= 0; --i) {
        Block read(sizes[i], 99);
        disk.wait(disk.read(offsets[i], read.data(), sizes[i]));
        EXPECT_TRUE(read.equals(*blocks[i])) << disk.describe() << " " << sizes[i];
      }
      EXPECT_EQ(disk.bytes_read(), disk.bytes_written());
    }
  }
}

TEST_F(DiskTest, AFullDiskIsFoundBeforeTheFirstByte) {
  Disk disk(options());
  disk.reserve(int64_t{1} << 50);
  const std::string error = error_of([&] { disk.allocate(); });
  EXPECT_NE(error.find(folder_), std::string::npos) << error;
  EXPECT_NE(error.find("free"), std::string::npos) << error;
}

TEST_F(DiskTest, AFolderThatIsNotThereIsNamed) {
  DiskOptions wrong = options();
  wrong.paths = {folder_ + "/nowhere"};
  try {
    const Disk disk(wrong);
    FAIL() << "there is no such folder";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("nowhere"), std::string::npos);
  }
}

// Does what the request says, and then says something else.
class FaultyIo final : public BlockIo {
 public:
  explicit FaultyIo(std::function<int64_t(const BlockRequest&, int64_t)> twist)
      : twist_(std::move(twist)), real_(BlockIo::threads(1)) {}
  void submit(BlockRequest request) override {
    const BlockRequest copy = request;
    request.done = [this, copy](int64_t moved) { copy.done(twist_(copy, moved)); };
    real_->submit(std::move(request));
  }
  const char* name() const override { return "faulty"; }

 private:
  std::function<int64_t(const BlockRequest&, int64_t)> twist_;
  std::unique_ptr<BlockIo> real_;
};

TEST_F(DiskTest, EveryFaultIsAnErrorThatNamesTheRequest) {
  struct Fault {
    const char* says;
    std::function<int64_t(const BlockRequest&, int64_t)> twist;
  };
  const Fault faults[] = {
      {"Input/output error",
       [](const BlockRequest& r, int64_t moved) { return r.write ? moved : -EIO; }},
      {"No space left",
       [](const BlockRequest& r, int64_t moved) { return r.write ? -ENOSPC : moved; }},
      {"moved only 512", [](const BlockRequest& r, int64_t m) { return r.write ? m : 512; }},
      {"other bytes",
       [](const BlockRequest& r, int64_t moved) {
         if (!r.write) r.data[5] ^= 1;
         return moved;
       }},
      {"no progress for 0.2 s",
       [](const BlockRequest&, int64_t moved) {
         std::this_thread::sleep_for(std::chrono::milliseconds(600));
         return moved;
       }},
  };
  for (const Fault& fault : faults) {
    Block block(9000);
    DiskOptions faulty = options();
    faulty.stall_s = 0.2;
    faulty.make_io = [&fault] { return std::make_unique<FaultyIo>(fault.twist); };
    Disk disk(faulty);
    const int64_t offset = disk.reserve(9000);
    disk.allocate();
    const std::string error = error_of([&] {
      disk.wait(disk.write(offset, block.data(), 9000));
      disk.wait(disk.read(offset, block.data(), 9000));
    });
    EXPECT_NE(error.find(fault.says), std::string::npos) << fault.says << ": " << error;
    EXPECT_NE(error.find("bytes at offset"), std::string::npos) << error;
    EXPECT_NE(error.find(folder_), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace penstock::mem
