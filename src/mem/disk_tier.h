#pragma once
// Disk: the tier below memory. Each rank has one nameless swap file per path. So when the process
// ends, even by a crash, nothing stays on the disk. Space is claimed before the first byte is
// written, so a full disk causes an error before the first step. Users' files can serve as extents
// that are only read.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/mem/block_io.h"
#include "src/trace/recorder.h"

namespace penstock {
class Board;
}

namespace penstock::mem {

struct DiskOptions {
  std::vector<std::string> paths;             // folders; stripes are placed on them in turn
  int64_t stripe_bytes = 4LL << 20;           // the largest size of one request
  double stall_s = 60.0;                      // a wait throws if no request ends for this long
  bool checksums = false;                     // checks that reads return the bytes written before
  std::shared_ptr<trace::Recorder> recorder;  // records reads and writes; null: none
  std::function<std::unique_ptr<BlockIo>()> make_io;  // for tests; default BlockIo::best()
  std::optional<bool> cache_files;                    // for tests; default: whether there is room
};

// Bytes of a user's file. They are at `at` in their extent.
struct FilePart {
  std::string path;
  std::shared_ptr<const void> opened;  // keeps `file` open
  int file = -1;                       // descriptor
  int64_t offset = 0, bytes = 0, at = 0;
  std::function<void()> check{};  // throws if the file was changed since it was opened
};

// One read or write in flight. Copies of a ticket refer to the same request. A default-constructed
// ticket is done.
class DiskTicket {
 public:
  DiskTicket() = default;

 private:
  friend class Disk;
  struct Impl;
  std::shared_ptr<Impl> state_;
};

// Usable from any thread. If the system moves only a part of a request, the remaining part is
// submitted again. If a request fails, wait() throws a RuntimeFault that names path, offset and
// bytes.
class Disk {
 public:
  explicit Disk(const DiskOptions& options);
  // Waits for requests in flight, as end() does. If a request hangs, the disk's files and threads
  // are not destroyed.
  ~Disk();

  // Reserves an extent and returns its offset. Call allocate() before I/O on the extent. After
  // allocate(), more extents can be reserved.
  int64_t reserve(int64_t bytes);
  // Claims the space that was reserved since the last allocate(). Throws RuntimeFault with path,
  // bytes needed and bytes free if a disk is too full.
  void allocate();
  // Calls reserve() and allocate(). Reserves nothing if the disk is too full.
  int64_t claim(int64_t bytes);

  // Makes an extent of parts of users' files, and returns its offset. The parts are in order and do
  // not overlap. The bytes between them, and those after the last one, read as zeros. If all
  // files take at most half of the free memory, they are read through the page cache. Otherwise
  // reads bypass it, because each part would evict the parts that are read next. Only one thread at
  // a time may call adopt().
  int64_t adopt(std::vector<FilePart> parts);
  // Returns whether the offset is in an extent of adopt(), to which write() may not be called.
  static bool is_read_only(int64_t offset);

  // `data` is aligned to kBlockBytes and has block_padded(bytes) bytes. It must stay valid until
  // done().
  DiskTicket read(int64_t offset, char* data, int64_t bytes);
  DiskTicket write(int64_t offset, const char* data, int64_t bytes);
  void wait(const DiskTicket& ticket) const;
  // Shows waits as the lane "disk" of `board`, which must outlive the disk. Null: shows no waits.
  // Must be called before the first wait.
  void show_on(Board* board);
  bool done(const DiskTicket& ticket) const;  // true even after an error
  // Blocks until every request has ended. Throws if the disk stalls; errors of requests are thrown
  // only by wait().
  void wait_for_all() const;
  // Must be called at the end of the disk's life. Waits as wait_for_all() does, but does not throw.
  // If the disk stalled, returns the addresses that the system may still read or write. The memory
  // at these addresses must never be freed.
  std::vector<const char*> end() const;

  int64_t reserved() const;
  int64_t held() const;        // reserved(), and the bytes of all parts of users' files
  int64_t bytes_read() const;  // counts finished requests only
  int64_t bytes_written() const;
  double busy_s() const;         // total seconds with a request in flight
  std::string describe() const;  // "2 files, io_uring, O_DIRECT"

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::mem
