#pragma once
// Copy: a flat's role under one placement. The book of copies is src/plan/copies.h.
#include <algorithm>
#include <vector>

#include "src/mem/disk_traffic.h"
#include "src/place/placement.h"

namespace penstock::exec {

using mem::Buffer;

// One buffer; of the optimizer the master and the moments.
struct Copy {
  Placement place;
  std::vector<Buffer> buffers;
  // Holds values. One that does not is a place on disk, kept for the next time.
  bool valid = true;

  Buffer& one() { return buffers.front(); }
  const Buffer& one() const { return buffers.front(); }
};

// The valid copy there; null where there is none.
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
