#pragma once
// Disk: the tier below memory. One swap file per path and rank, without a name, so that nothing is
// left whatever ends the process. Space is claimed before the first byte is written: a full disk is
// found before step one.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/mem/block_io.h"
#include "src/trace/recorder.h"

namespace penstock::mem {

struct DiskOptions {
  std::vector<std::string> paths;    // folders; stripes go round them
  int64_t stripe_bytes = 4LL << 20;  // also the size of one request at most
  double stall_s = 60.0;             // a wait in which no request ends for so long is an error
  bool checksums = false;            // what is read is compared with what was written
  std::shared_ptr<trace::Recorder> recorder;          // of reads and writes; null: nobody's
  std::function<std::unique_ptr<BlockIo>()> make_io;  // for tests; default BlockIo::best()
};

// One read or write in flight. Copies share it; a default one is done.
class DiskTicket {
 public:
  DiskTicket() = default;

 private:
  friend class Disk;
  struct Impl;
  std::shared_ptr<Impl> state_;
};

// Any thread. A request that the system cuts short or interrupts goes on with its rest. Errors are
// RuntimeFaults that name path, offset and bytes; they are thrown by wait().
class Disk {
 public:
  explicit Disk(const DiskOptions& options);
  // Waits for what is in flight, as end() does; what hangs is left to itself, not torn down.
  ~Disk();

  // An extent's offset. I/O on it comes after an allocate(), which may be called again for more.
  int64_t reserve(int64_t bytes);
  // Claims what was reserved since the last time. Throws RuntimeFault with path, bytes needed and
  // bytes free when a disk is too full.
  void allocate();
  // Both at once. Where the disk is too full nothing is reserved.
  int64_t claim(int64_t bytes);

  // `data` is kBlockBytes-aligned and has room for block_padded(bytes). It stays until done().
  DiskTicket read(int64_t offset, char* data, int64_t bytes);
  DiskTicket write(int64_t offset, const char* data, int64_t bytes);
  void wait(const DiskTicket& ticket) const;
  bool done(const DiskTicket& ticket) const;  // well or not
  // Every request is done; their errors are wait()'s. Throws when the disk stalls.
  void wait_for_all() const;
  // The same at the end of the disk's life, without a throw: addresses that the system may still
  // read or write because the disk stalled. That memory must never be freed.
  std::vector<const char*> end() const;

  int64_t reserved() const;
  int64_t bytes_read() const;  // by requests that are done
  int64_t bytes_written() const;
  double busy_s() const;         // seconds so far in which requests were under way
  std::string describe() const;  // "2 files, io_uring, O_DIRECT"

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::mem
