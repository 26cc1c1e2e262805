#pragma once
// ChangeWatch: the interface that is called before bytes at rest change, because a background save
// may still have to read them.
#include <cstdint>

namespace penstock::mem {

// Callable from any thread.
class ChangeWatch {
 public:
  virtual ~ChangeWatch() = default;
  // Both functions block until the bytes may be changed.
  virtual void memory_changes(const char* data, int64_t bytes) = 0;
  virtual void disk_changes(int64_t offset, int64_t bytes) = 0;
};

}  // namespace penstock::mem
