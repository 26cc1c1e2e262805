#include "src/mem/extents.h"

#include <algorithm>
#include <iterator>

namespace penstock::mem {

int64_t Extents::take(int64_t bytes) {
  // Takes the first free extent that fits. A larger extent is split, and its rest stays free.
  bytes = block_padded(bytes);
  {
    const std::lock_guard lock(mutex_);
    const auto first = std::find_if(free_.begin(), free_.end(),
                                    [&](const auto& extent) { return extent.second >= bytes; });
    if (first != free_.end()) {
      const auto [offset, size] = *first;
      free_.erase(first);
      if (size > bytes) free_[offset + bytes] = size - bytes;
      return offset;
    }
  }
  // No free extent is large enough: the file grows.
  return disk_.claim(bytes);
}

void Extents::give_back(int64_t offset, int64_t bytes) {
  bytes = block_padded(bytes);
  const std::lock_guard lock(mutex_);
  // Merges the extent with free neighbours on both sides.
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

int64_t Extents::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = disk_.reserved();
  for (const auto& [offset, size] : free_) bytes -= size;
  return bytes;
}

}  // namespace penstock::mem
