#pragma once
// Buffer: values in memory or on disk. DiskTraffic: moves buffers that rest on disk, with
// read-ahead and write-behind.
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "src/mem/change_watch.h"
#include "src/mem/tiers.h"
#include "src/place/placement.h"

namespace penstock::mem {

struct Buffer {
  Lease memory;       // a buffer on disk has memory only while it is loaded
  int64_t numel = 0;  // 0: the buffer does not exist
  Dtype dtype = Dtype::kFp32;
  Tier tier = Tier::kDevice;
  int64_t offset = -1;    // offset of its extent on disk
  int64_t writable = -1;  // extent for the first write of a buffer in users' files; -1: none yet
  DiskTicket moving;      // the read into `memory`

  bool exists() const { return numel > 0; }
  bool on_disk() const { return tier == Tier::kDisk; }
  int64_t bytes() const { return buffer_bytes(dtype, numel); }
  device::Address data() const { return memory.data(); }
  device::Address at(int64_t element) const {
    return element == 0 ? data() : data() + element * dtype_bytes(dtype);
  }
};

// Usable from any thread, but only one thread at a time may use a buffer. A buffer may be a part of
// another buffer on disk, so each read or write waits for earlier writes of the same bytes. No lock
// is held during a wait for the disk.
class DiskTraffic {
 public:
  explicit DiskTraffic(Tiers& tiers) : tiers_(tiers) {}
  const Tiers& tiers() const { return tiers_; }

  // Starts the read, unless the bytes are in memory.
  void fetch(Buffer& buffer, Account account);
  // Starts a read of a buffer on disk to other memory, which must be as aligned and as large as
  // that of a lease.
  DiskTicket read(const Buffer& buffer, device::Address to);
  // Takes memory for a buffer. The caller must then write all values.
  void make_room(Buffer& buffer, Account account);
  // Blocks until the bytes are in memory.
  void wait_read(const Buffer& buffer) const;
  // Starts the write. The write owns the memory and frees it at the end. A buffer in users' files
  // moves to the swap file.
  void put_back(Buffer& buffer);
  // Claims space in the swap file for a buffer in users' files, which will be written. Throws
  // RuntimeFault if the disk is too full.
  void claim_write(Buffer& buffer);
  // Frees the memory of a buffer that was fetched and not changed.
  void let_go(Buffer& buffer);
  // Waits until no read or write uses the memory, then frees it. The contents are lost.
  void drop(Buffer& buffer);
  void settle();  // blocks until every write is done
  // Sets the watch that is called before bytes at rest change; null: none.
  void watch(std::shared_ptr<ChangeWatch> watch) { watch_.store(std::move(watch)); }
  // Call before changing the bytes of a buffer that rests in memory. For buffers on disk,
  // put_back() calls the watch.
  void changes(const Buffer& buffer);
  void forget();  // called after the disk has ended: frees the memory of its writes

 private:
  struct Write {
    int64_t offset = 0, bytes = 0;
    DiskTicket ticket;
    Lease memory;
    int64_t number = 0;
  };
  void settle(int64_t begin, int64_t end);  // blocks until every write of those bytes is done

  Tiers& tiers_;
  std::atomic<std::shared_ptr<ChangeWatch>> watch_;
  std::mutex mutex_;
  std::deque<Write> writing_;  // guarded by mutex_
  int64_t num_writes_ = 0;     // guarded by mutex_
};

}  // namespace penstock::mem
