#pragma once
// ShmSegment: memory that the ranks of one host share. It is a file without a name (memfd). The
// other ranks open it through /proc while the rank that made it keeps it open. The kernel frees the
// memory when the last process that mapped it ends, for whatever reason. /dev/shm is not used, so
// neither its size nor old files in it matter.
#include <cstdint>
#include <string>

#include "src/comm/shm/layout.h"

namespace penstock::comm {

// Tells another process where the segment is.
struct ShmAddress {
  int64_t pid = 0;
  int file = -1;
  uint64_t key = 0;  // random; open() checks it, to reject any other file
};

// Move-only. Forked processes do not inherit the memory. make() allocates all of the memory, and
// throws if there is too little. So no later access can fail.
class ShmSegment {
 public:
  ShmSegment() = default;
  static ShmSegment make(const ShmShape& shape, uint64_t key);
  // Opens a segment of that shape. Throws if there is none at `address`.
  static ShmSegment open(const ShmShape& shape, const ShmAddress& address);
  ShmSegment(ShmSegment&& other) noexcept;
  ShmSegment& operator=(ShmSegment&& other) noexcept;
  ~ShmSegment();

  ShmAddress address() const;
  // Closes the file, so that no other process can open it. Rank 0 calls this after all ranks have
  // opened the segment.
  void seal();

  const ShmShape& shape() const { return shape_; }
  ShmBell& bell(int rank) const;
  ShmLink& link(int from, int to) const;
  char* chunk(int from, int to, int slot, uint32_t number) const;

 private:
  void map(int64_t bytes);
  void let_go();

  ShmShape shape_;
  int file_ = -1;
  char* memory_ = nullptr;
};

}  // namespace penstock::comm
