#pragma once
// Copy: the values that a flat has for one role, under one placement. The book of copies is in
// src/plan/copies.h.
#include <algorithm>
#include <vector>

#include "src/mem/disk_traffic.h"
#include "src/place/placement.h"

namespace penstock::exec {

using mem::Buffer;

// One buffer. For optimizer state: one buffer for the master and one for each moment.
struct Copy {
  Placement place;
  std::vector<Buffer> buffers;
  // True if the copy holds values. An invalid copy only keeps its place, such as an extent on disk.
  bool valid = true;

  Buffer& one() { return buffers.front(); }
  const Buffer& one() const { return buffers.front(); }
};

// Returns the valid copy at `place`, or null.
inline Copy* find(std::vector<Copy>& copies, const Placement& place) {
  const auto found = std::find_if(copies.begin(), copies.end(), [&](const Copy& copy) {
    return copy.valid && copy.place == place;
  });
  return found == copies.end() ? nullptr : &*found;
}
inline const Copy* find(const std::vector<Copy>& copies, const Placement& place) {
  return find(const_cast<std::vector<Copy>&>(copies), place);
}

}  // namespace penstock::exec
