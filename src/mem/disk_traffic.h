#pragma once
// Buffer: values in memory or on disk. DiskTraffic: moves the buffers of disk, read ahead and
// written behind.
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
  Lease memory;       // where it rests, or a window while it is away from disk
  int64_t numel = 0;  // 0: there is no such buffer
  Dtype dtype = Dtype::kFp32;
  Tier tier = Tier::kDevice;
  int64_t offset = -1;  // of its extent on disk
  DiskTicket moving;    // the read into `memory`

  bool exists() const { return numel > 0; }
  bool on_disk() const { return tier == Tier::kDisk; }
  int64_t bytes() const { return numel * dtype_bytes(dtype); }
  device::Address data() const { return memory.data(); }
  device::Address at(int64_t element) const { return memory.data() + element * dtype_bytes(dtype); }
};

// Any thread, but one at a time for each buffer. A buffer may be a part of another on disk: what is
// read or written comes after the writes of its bytes. No lock is held while the disk is waited
// for.
class DiskTraffic {
 public:
  explicit DiskTraffic(Tiers& tiers) : tiers_(tiers) {}
  const Tiers& tiers() const { return tiers_; }

  // Starts the read, unless the bytes are in memory.
  void fetch(Buffer& buffer, Account account);
  // Memory for the values, which are about to be written whole.
  void make_room(Buffer& buffer, Account account);
  // The bytes are in memory when this returns.
  void wait_read(const Buffer& buffer) const;
  // Starts the write; the memory goes with it and is let go when it is done.
  void put_back(Buffer& buffer);
  // What was fetched and not changed.
  void let_go(Buffer& buffer);
  // Gives its memory back when nothing moves it any more, whatever is in it.
  void drop(Buffer& buffer);
  void settle();  // every write is done
  // Who is told before what rests changes; null: nobody.
  void watch(std::shared_ptr<ChangeWatch> watch) { watch_.store(std::move(watch)); }
  // To be called before the bytes in memory of what rests there change. Those on disk: put_back().
  void changes(const Buffer& buffer);
  void forget();  // the disk has ended: what it was given is let go

 private:
  struct Write {
    int64_t offset = 0, bytes = 0;
    DiskTicket ticket;
    Lease memory;
    int64_t number = 0;
  };
  void settle(int64_t begin, int64_t end);  // every write of those bytes

  Tiers& tiers_;
  std::atomic<std::shared_ptr<ChangeWatch>> watch_;
  std::mutex mutex_;
  std::deque<Write> writing_;  // guarded by mutex_
  int64_t num_writes_ = 0;     // guarded by mutex_
};

}  // namespace penstock::mem
