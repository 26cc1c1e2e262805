#pragma once
// ChangeWatch: called before bytes at rest change. A save in the background reads them.
#include <cstdint>

namespace penstock::mem {

// Any thread.
class ChangeWatch {
 public:
  virtual ~ChangeWatch() = default;
  // Return when the bytes may change.
  virtual void memory_changes(const char* data, int64_t bytes) = 0;
  virtual void disk_changes(int64_t offset, int64_t bytes) = 0;
};

}  // namespace penstock::mem
