#pragma once
// ShmSegment: memory that the ranks of one host share. It never has a name: it is an anonymous file
// (memfd), which the others open through /proc while the rank that made it holds it open, and which
// is gone with the last process that has mapped it, however that ends. So /dev/shm, its size and
// what may be left in it do not matter.
#include <cstdint>
#include <string>

#include "src/comm/shm/layout.h"

namespace penstock::comm {

// Where another process finds it.
struct ShmAddress {
  int64_t pid = 0;
  int file = -1;
  uint64_t key = 0;  // a number of its own, so that no other file is taken for it
};

// Move-only. Not inherited by what a rank forks. Where there is no memory this throws, here and now
// (all of it is allocated): no later access may fail.
class ShmSegment {
 public:
  ShmSegment() = default;
  static ShmSegment make(const ShmShape& shape, uint64_t key);
  // Of that shape; throws where it is not to be found.
  static ShmSegment open(const ShmShape& shape, const ShmAddress& address);
  ShmSegment(ShmSegment&& other) noexcept;
  ShmSegment& operator=(ShmSegment&& other) noexcept;
  ~ShmSegment();

  ShmAddress address() const;
  // When all others have opened it. Then nobody else can.
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
