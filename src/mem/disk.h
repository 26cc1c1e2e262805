#pragma once
// Disk: the tier below memory. One swap file per path and rank, unlinked when it is opened, so that
// nothing is left whatever ends the process. Space is claimed before the first byte is written: a
// full disk is found before step one.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/mem/block_io.h"

namespace penstock::mem {

struct DiskOptions {
  std::vector<std::string> paths;    // folders; stripes go round them
  int64_t stripe_bytes = 4LL << 20;  // also the size of one request at most
  double stall_s = 60.0;             // a request without progress for so long is an error
  bool checksums = false;            // a read of what one write wrote is checked (debugging)
  std::function<std::unique_ptr<BlockIo>()> make_io;  // for tests; default BlockIo::best()
};

// One read or write in flight. Copies share it; a default one is done.
class DiskTicket {
 public:
  DiskTicket() = default;

 private:
  friend class Disk;
  struct State;
  std::shared_ptr<State> state_;
};

// Any thread. Errors are RuntimeFaults that name path, offset and bytes; they are thrown by wait().
class Disk {
 public:
  explicit Disk(const DiskOptions& options);
  ~Disk();

  // An extent's offset; its I/O comes after the allocate() that follows.
  int64_t reserve(int64_t bytes);
  // Claims what was reserved since the last time. Throws RuntimeFault with path, bytes needed and
  // bytes free when a disk is too full.
  void allocate();

  // `data` is kBlockBytes-aligned and has room for block_padded(bytes).
  DiskTicket read(int64_t offset, char* data, int64_t bytes);
  DiskTicket write(int64_t offset, const char* data, int64_t bytes);
  void wait(const DiskTicket& ticket) const;

  int64_t reserved() const { return reserved_; }
  int64_t bytes_read() const;
  int64_t bytes_written() const;
  std::string describe() const;  // "2 files, io_uring, O_DIRECT"

 private:
  struct File {
    std::string path;
    int descriptor = -1;
    bool direct = true;
  };
  DiskTicket start(bool write, int64_t offset, char* data, int64_t bytes);
  void open(const std::string& folder);
  std::string request_text(bool write, const File& file, int64_t offset, int64_t bytes) const;

  const DiskOptions options_;
  std::vector<File> files_;
  int64_t reserved_ = 0;
  int64_t allocated_ = 0;  // of each file
  mutable std::mutex mutex_;
  int64_t bytes_read_ = 0, bytes_written_ = 0;  // guarded by mutex_
  std::map<int64_t, uint64_t> sums_;            // guarded by mutex_; of what is at an offset
  std::unique_ptr<BlockIo> io_;                 // last: its threads end first
};

}  // namespace penstock::mem
