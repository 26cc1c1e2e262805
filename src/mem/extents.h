#pragma once
// Extents: pieces of a swap file that come and go. The file grows to the most that was in use at
// once.
#include <cstdint>
#include <map>
#include <mutex>

#include "src/mem/disk.h"

namespace penstock::mem {

class Extents {
 public:
  explicit Extents(const DiskOptions& options) : disk_(options) {}

  // An offset for I/O on disk(). One thread at a time. Throws RuntimeFault with path, bytes needed
  // and bytes free when the file has to grow and the disk is too full.
  int64_t take(int64_t bytes);
  // Any thread; no I/O on it is in flight.
  void give_back(int64_t offset, int64_t bytes);

  Disk& disk() { return disk_; }
  int64_t bytes_in_use() const;

 private:
  Disk disk_;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes, never neighbours; guarded by mutex_
};

}  // namespace penstock::mem
