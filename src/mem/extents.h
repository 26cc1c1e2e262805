#pragma once
// Extents: parts of a swap file that are taken and given back. The file grows to the largest
// number of bytes in use at once.
#include <cstdint>
#include <map>
#include <mutex>

#include "src/mem/disk_tier.h"

namespace penstock::mem {

class Extents {
 public:
  explicit Extents(const DiskOptions& options) : disk_(options) {}

  // Returns an offset for I/O on disk(). Only one thread at a time may call take(). Throws
  // RuntimeFault with path, bytes needed and bytes free if the file must grow and the disk is too
  // full.
  int64_t take(int64_t bytes);
  // Any thread may call give_back(). No I/O on the extent may be in flight.
  void give_back(int64_t offset, int64_t bytes);

  Disk& disk() { return disk_; }
  int64_t bytes_in_use() const;

 private:
  Disk disk_;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes; neighbours are merged; guarded by mutex_
};

}  // namespace penstock::mem
