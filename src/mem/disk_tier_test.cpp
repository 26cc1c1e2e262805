#include "src/mem/disk_tier.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/mem/swap_file.h"
#include "src/mem/tiers.h"

namespace penstock::mem {
namespace {

// Aligned memory filled with a pattern from `seed`.
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

// A file with a pattern, like those that users give the disk to read.
class UsersFile {
 public:
  UsersFile(const std::string& path, int64_t bytes) : path(path) {
    for (int64_t i = 0; i < bytes; ++i) text += static_cast<char>(i * 11 + i / 251);
    std::ofstream(path) << text;
    file = std::shared_ptr<int>(new int(open(path.c_str(), O_RDONLY)), [](const int* one) {
      close(*one);
      delete one;
    });
  }
  FilePart part(int64_t offset, int64_t bytes, int64_t at) const {
    return {path, file, *file, offset, bytes, at, check};
  }

  const std::string path;
  std::string text;
  std::shared_ptr<int> file;
  std::function<void()> check = [] {};
};

class UsersFileTest : public DiskTest, public testing::WithParamInterface<bool> {
 protected:
  DiskOptions options(int num_paths = 1) const {
    DiskOptions found = DiskTest::options(num_paths);
    found.cache_files = GetParam();
    return found;
  }
};
INSTANTIATE_TEST_SUITE_P(Cached, UsersFileTest, testing::Bool());

TEST_P(UsersFileTest, ReadsAtAnyOffset) {
  const UsersFile one(folder_ + "/one", 300'000), two(folder_ + "/two", 70'001);
  Disk disk(options(2));
  disk.claim(10 * kBlockBytes);
  const int64_t bytes = 60 * kBlockBytes;
  const int64_t other = disk.adopt({two.part(0, 10, 0)});
  const int64_t offset = disk.adopt(
      {one.part(3, 150'001, 64), two.part(1, 70'000, 150'100), two.part(69'999, 2, bytes - 5'000)});
  EXPECT_TRUE(Disk::is_read_only(offset) && Disk::is_read_only(other));
  EXPECT_FALSE(Disk::is_read_only(0) || Disk::is_read_only(-1));
  std::string expected(static_cast<size_t>(bytes), '\0');
  expected.replace(64, 150'001, one.text, 3, 150'001);
  expected.replace(150'100, 70'000, two.text, 1, 70'000);
  expected.replace(static_cast<size_t>(bytes - 5'000), 2, two.text, 69'999, 2);
  for (const auto& [first, count] : {std::pair{0, 60}, {0, 1}, {36, 1}, {37, 13}, {57, 3}}) {
    Block block(count * kBlockBytes, 5);
    disk.wait(disk.read(offset + first * kBlockBytes, block.data(), count * kBlockBytes));
    EXPECT_EQ(std::string_view(block.data(), count * kBlockBytes),
              std::string_view(expected).substr(first * kBlockBytes, count * kBlockBytes))
        << first;
  }
  Block block(kBlockBytes, 5);
  disk.wait(disk.read(other, block.data(), 10));
  EXPECT_EQ(std::string_view(block.data(), 11), two.text.substr(0, 10) + '\0');
  EXPECT_EQ(disk.bytes_written(), 0);
  for (const UsersFile* file : {&one, &two}) std::filesystem::remove(file->path);
}

TEST_P(UsersFileTest, SaysWhatIsWrong) {
  UsersFile file(folder_ + "/one", 100'000);
  Disk disk(options());
  Block block(200'000);
  const int64_t longer = disk.adopt({file.part(50'000, 60'000, 0)});
  const std::string ended = error_of([&] { disk.wait(disk.read(longer, block.data(), 60'000)); });
  EXPECT_NE(ended.find("/one\" reached the end of the file after"), std::string::npos) << ended;
  file.check = [] { throw RuntimeFault("changed"); };
  const int64_t changed = disk.adopt({file.part(0, 10, 0), file.part(10, 10, 10)});
  EXPECT_EQ(error_of([&] { disk.read(changed, block.data(), 20); }), "changed");
  disk.wait_for_all();  // no request of that read is left
  std::filesystem::remove(file.path);
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

// Number of open descriptors of this process.
auto num_descriptors() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
}

TEST_F(DiskTest, AFolderThatCannotBeUsedKeepsNothingOfTheOthers) {
  DiskOptions wrong = options(2);
  wrong.paths.push_back(folder_ + "/nowhere");
  const auto before = num_descriptors();
  EXPECT_THROW(const Disk disk(wrong), ConfigError);
  EXPECT_EQ(num_descriptors(), before);
}

// An io that changes requests before they run, and results after they ran.
class FaultyIo final : public BlockIo {
 public:
  using Before = std::function<void(BlockRequest&)>;
  using After = std::function<int64_t(const BlockRequest&, int64_t)>;
  FaultyIo(Before before, After after)
      : before_(std::move(before)), after_(std::move(after)), real_(BlockIo::threads(1)) {}
  void submit(BlockRequest request) override {
    ++num_submitted;
    const BlockRequest copy = request;
    if (before_) before_(request);
    request.done = [this, copy](int64_t moved) { copy.done(after_ ? after_(copy, moved) : moved); };
    real_->submit(std::move(request));
  }
  const char* name() const override { return "faulty"; }

  std::atomic<int> num_submitted = 0;

 private:
  Before before_;
  After after_;
  std::unique_ptr<BlockIo> real_;
};

TEST_F(DiskTest, ARequestThatIsCutShortGoesOnWithItsRest) {
  struct Case {
    const char* name;
    FaultyIo::Before before;
    FaultyIo::After after;
  };
  const auto at_most = [](int64_t bytes) {
    return [bytes](BlockRequest& request) { request.bytes = std::min(request.bytes, bytes); };
  };
  int num_calls = 0;
  const auto often = [&num_calls](int error) {
    return [&num_calls, error](const BlockRequest&, int64_t moved) -> int64_t {
      return num_calls++ % 3 == 2 ? moved : -error;
    };
  };
  const Case cases[] = {{"short by blocks", at_most(2 * kBlockBytes), {}},
                        {"short within a block",
                         {},
                         [](const BlockRequest& r, int64_t moved) {
                           return r.bytes > kBlockBytes ? kBlockBytes + 512 : moved;
                         }},
                        {"interrupted", {}, often(EINTR)},
                        {"again", {}, often(EAGAIN)},
                        {"short and interrupted", at_most(kBlockBytes), often(EINTR)}};
  for (const Case& c : cases) {
    DiskOptions opened = options(2);
    FaultyIo* io = nullptr;
    opened.make_io = [&] {
      auto made = std::make_unique<FaultyIo>(c.before, c.after);
      io = made.get();
      return made;
    };
    Disk disk(opened);
    const int64_t bytes = 40 * kBlockBytes;  // 3 stripes
    const int64_t offset = disk.reserve(bytes);
    disk.allocate();
    Block written(bytes, 3), read(bytes, 99);
    disk.wait(disk.write(offset, written.data(), bytes));
    disk.wait(disk.read(offset, read.data(), bytes));
    EXPECT_TRUE(read.equals(written)) << c.name;
    EXPECT_EQ(disk.bytes_read(), bytes) << c.name;
    EXPECT_EQ(disk.bytes_written(), bytes) << c.name;
    EXPECT_GT(io->num_submitted, 6) << c.name;
  }
}

TEST_F(DiskTest, TheLastRestIsMadeBeforeTheIoEnds) {
  for (const bool uring : {true, false}) {
    std::atomic<int> num_results = 0;
    const SwapFile file = SwapFile::open(folder_);
    file.claim(0, 8 * kBlockBytes);
    Block block(8 * kBlockBytes);
    {
      std::unique_ptr<BlockIo> io = uring ? BlockIo::uring(8) : BlockIo::threads(1);
      if (!io) continue;  // the kernel forbids it
      BlockIo* const raw = io.get();
      std::function<void(int64_t)> more = [&](int64_t) {
        if (++num_results < 20) {
          raw->submit({file.descriptor(), true, block.data(), 0, kBlockBytes, more});
        }
      };
      raw->submit({file.descriptor(), true, block.data(), 0, kBlockBytes, more});
      io.reset();  // while a request that submits another one is in flight
    }
    EXPECT_EQ(num_results, 20);
  }
}

TEST_F(DiskTest, ReadsAndWritesTakeTurns) {
  const SwapFile file = SwapFile::open(folder_);
  file.claim(0, kBlockBytes);
  Block block(kBlockBytes);
  std::promise<void> started, all_wait;
  std::string order;
  std::unique_ptr<BlockIo> io = BlockIo::threads(1);
  const auto submit = [&](bool write, const std::function<void(int64_t)>& done) {
    io->submit({file.descriptor(), write, block.data(), 0, kBlockBytes, done});
  };
  submit(true, [&](int64_t) {
    started.set_value();
    all_wait.get_future().wait();
  });
  started.get_future().wait();
  for (const char kind : std::string("wwwwwrrr")) {
    submit(kind == 'w', [&order, kind](int64_t) { order += kind; });
  }
  all_wait.set_value();
  io.reset();
  EXPECT_EQ(order, "rwrwrwww");
}

TEST_F(DiskTest, EveryFaultIsAnErrorThatNamesTheRequest) {
  struct Fault {
    const char* says;
    FaultyIo::After after;
    FaultyIo::Before before;
  };
  const auto on_reads = [](int64_t result) {
    return [result](const BlockRequest& r, int64_t moved) { return r.write ? moved : result; };
  };
  const auto first_block = [](BlockRequest& request) { request.bytes = kBlockBytes; };
  const Fault faults[] = {
      {"failed: Input/output error", on_reads(-EIO), {}},
      {"failed: No space left",
       [](const BlockRequest& r, int64_t moved) { return r.write ? -ENOSPC : moved; },
       {}},
      {"failed after 4096 of them: Input/output error",
       [](const BlockRequest& r, int64_t moved) { return r.offset > 0 ? -EIO : moved; },
       first_block},
      {"reached the end of the file after 0 of them", on_reads(0), {}},
      {"made no progress in 100 tries after 0 of them", on_reads(512), {}},
      {"made no progress in 100 tries after 0 of them", on_reads(-EINTR), {}},
      {"bytes that differ",
       [](const BlockRequest& r, int64_t moved) {
         if (!r.write) r.data[5] ^= 1;
         return moved;
       },
       {}},
  };
  for (const Fault& fault : faults) {
    Block block(9000);
    DiskOptions faulty = options();
    faulty.make_io = [&] { return std::make_unique<FaultyIo>(fault.before, fault.after); };
    Disk disk(faulty);
    const int64_t offset = disk.reserve(9000);
    disk.allocate();
    const std::string error = error_of([&] {
      disk.wait(disk.write(offset, block.data(), 9000));
      disk.wait(disk.read(offset, block.data(), 9000));
    });
    EXPECT_NE(error.find(fault.says), std::string::npos) << fault.says << ": " << error;
    EXPECT_NE(error.find("of 12288 bytes at offset 0"), std::string::npos) << error;
    EXPECT_NE(error.find(folder_), std::string::npos) << error;
  }
}

TEST_F(DiskTest, WhatWasReadMayChangeOnceItIsThere) {
  Disk disk(options());
  Block block(40 * kBlockBytes);
  disk.reserve(40 * kBlockBytes);
  disk.allocate();
  disk.wait(disk.write(0, block.data(), 40 * kBlockBytes));
  const DiskTicket read = disk.read(0, block.data(), 40 * kBlockBytes);
  disk.wait(read);
  block.data()[7] ^= 1;
  EXPECT_NO_THROW(disk.wait(read)) << "only the end of a read compares checksums";
}

TEST_F(DiskTest, WhatIsReadNeedNotBeWhatOneWriteWrote) {
  std::atomic<bool> lies = false;
  DiskOptions changing = options();
  changing.make_io = [&] {
    return std::make_unique<FaultyIo>(nullptr, [&](const BlockRequest& r, int64_t moved) {
      if (!r.write && lies) r.data[5] ^= 1;
      return moved;
    });
  };
  Disk disk(changing);
  Block whole(8 * kBlockBytes), part(2 * kBlockBytes, 3);
  disk.reserve(9 * kBlockBytes);
  disk.allocate();
  disk.wait(disk.write(0, whole.data(), 8 * kBlockBytes));
  disk.wait(disk.write(4 * kBlockBytes, part.data(), 2 * kBlockBytes));
  Block seen(9 * kBlockBytes);
  EXPECT_NO_THROW(disk.wait(disk.read(0, seen.data(), 9 * kBlockBytes))) << "the end is unchecked";
  EXPECT_EQ(std::memcmp(seen.data() + 4 * kBlockBytes, part.data(), 2 * kBlockBytes), 0);
  lies = true;
  EXPECT_THROW(disk.wait(disk.read(3 * kBlockBytes, seen.data(), 2 * kBlockBytes)), RuntimeFault);
}

TEST_F(DiskTest, ChecksumsAreOnlyTakenWhenAskedFor) {
  DiskOptions plain = options();
  plain.checksums = false;
  plain.make_io = [] {
    return std::make_unique<FaultyIo>(nullptr, [](const BlockRequest& r, int64_t moved) {
      if (!r.write) r.data[5] ^= 1;
      return moved;
    });
  };
  Disk disk(plain);
  Block block(9000);
  disk.reserve(9000);
  disk.allocate();
  disk.wait(disk.write(0, block.data(), 9000));
  EXPECT_NO_THROW(disk.wait(disk.read(0, block.data(), 9000)));
}

// A disk that hangs: every request waits until the gate opens, and then writes to its memory.
class Gate {
 public:
  int64_t pass(const BlockRequest& request, int64_t moved) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
    std::memset(request.data, 1, static_cast<size_t>(request.bytes));
    passed_ = true;
    changed_.notify_all();
    return moved;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait_passed() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return passed_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false, passed_ = false;  // guarded by mutex_
};

TEST_F(DiskTest, AStallNamesTheRequestAndItsMemoryIsNeverFreed) {
  const int64_t sizes[] = {8 * kBlockBytes, 8 << 20};  // in the heap; in a separate mapping
  for (const int64_t bytes : sizes) {
    const auto gate = std::make_shared<Gate>();  // the io outlives this test
    DiskOptions hangs = options();
    hangs.stall_s = 0.2;
    hangs.stripe_bytes = 16 << 20;
    hangs.make_io = [gate] {
      return std::make_unique<FaultyIo>(
          nullptr, [gate](const BlockRequest& r, int64_t moved) { return gate->pass(r, moved); });
    };
    Tiers tiers;
    tiers.disk.emplace(hangs);
    tiers.disk->reserve(bytes);
    tiers.disk->allocate();
    Lease lease = tiers.host.take(bytes, Account::kOptim);
    const DiskTicket ticket = tiers.disk->write(0, lease.data().host(), bytes);
    for (const auto& waits : {std::function<void()>([&] { tiers.disk->wait(ticket); }),
                              std::function<void()>([&] { tiers.disk->wait_for_all(); })}) {
      const std::string error = error_of(waits);
      const std::string names =
          concat("no progress for 0.2 s (offload.timeout_s): the write of ", bytes,
                 " bytes at offset 0 of the swap file in \"", folder_, "\" was started ");
      EXPECT_NE(error.find(names), std::string::npos) << error;
      EXPECT_FALSE(tiers.disk->done(ticket));
    }
    tiers.close_disk();
    lease.reset();
    tiers.host.trim();
    EXPECT_EQ(tiers.host.usage().held, 0);
    gate->open();
    gate->wait_passed();  // the late request wrote to memory that still exists
  }
}

TEST_F(DiskTest, TheBoardShowsAWait) {
  const auto gate = std::make_shared<Gate>();
  DiskOptions waits = options();
  waits.make_io = [gate] {
    return std::make_unique<FaultyIo>(
        nullptr, [gate](const BlockRequest& r, int64_t moved) { return gate->pass(r, moved); });
  };
  Board board(0, 1);
  const auto lane = [&] { return board.status().lanes.front(); };
  Disk disk(waits);
  disk.show_on(&board);
  Block block(kBlockBytes);
  disk.reserve(kBlockBytes);
  disk.allocate();
  const DiskTicket ticket = disk.write(0, block.data(), kBlockBytes);
  std::thread waiter([&] { disk.wait(ticket); });
  while (!lane().waits) std::this_thread::yield();
  EXPECT_EQ(lane().name, kDiskLane);
  EXPECT_EQ(lane().line.text.rfind("write of ", 0), 0U) << lane().line.text;
  gate->open();
  waiter.join();
  EXPECT_FALSE(lane().waits);
}

TEST_F(DiskTest, ASlowDiskIsNoStall) {
  DiskOptions slow = options();
  slow.stall_s = 0.8;
  slow.stripe_bytes = kBlockBytes;
  slow.make_io = [] {
    return std::make_unique<FaultyIo>(nullptr, [](const BlockRequest&, int64_t moved) {
      std::this_thread::sleep_for(std::chrono::milliseconds(75));  // tests this delay
      return moved;
    });
  };
  Disk disk(slow);
  Block block(12 * kBlockBytes);
  disk.reserve(12 * kBlockBytes);
  disk.allocate();
  std::vector<DiskTicket> tickets;
  for (int64_t i = 0; i < 12; ++i) {
    tickets.push_back(disk.write(i * kBlockBytes, block.data() + i * kBlockBytes, kBlockBytes));
  }
  EXPECT_NO_THROW(disk.wait(tickets.back()));  // takes 0.9 s, with progress all the time
}

}  // namespace
}  // namespace penstock::mem
