#include "penstock/cut.h"

#include <algorithm>

namespace penstock {

// The first `more` ranks have one additional element.
std::pair<int64_t, int64_t> share(int64_t size, int index, int count) {
  const int64_t each = size / count, more = size % count;
  const int64_t first = index * each + std::min<int64_t>(index, more);
  return {first, first + each + (index < more ? 1 : 0)};
}

std::vector<std::pair<int64_t, int64_t>> Cut::ranges(int index, int count) const {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  if (kind != TensorCut::kCut) return ranges;
  int64_t begin = 0;
  for (const int64_t part : parts) {
    const auto [first, end] = share(part, index, count);
    ranges.emplace_back(begin + first, begin + end);
    begin += part;
  }
  return ranges;
}

int64_t Cut::size(int index, int count) const {
  int64_t size = 0;
  for (const auto& [first, end] : ranges(index, count)) size += end - first;
  return size;
}

}  // namespace penstock
