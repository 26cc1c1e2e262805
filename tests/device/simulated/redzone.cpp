#include "tests/device/simulated/redzone.h"

#include <c10/util/StringUtil.h>

#include <cstring>

namespace penstock::sim {
namespace {

// The pattern depends on the parity of the address. No kernel writes this pattern by accident.
constexpr unsigned char kPattern[2] = {0xA5, 0xFF};
constexpr int kPoison = 0xFF;

unsigned char pattern_at(const char* byte) { return kPattern[reinterpret_cast<size_t>(byte) % 2]; }

void fill(char* begin, const char* end) {
  for (; begin < end; ++begin) *begin = static_cast<char>(pattern_at(begin));
}

size_t count_changed(const char* begin, const char* end) {
  size_t changed = 0;
  for (; begin < end; ++begin) changed += static_cast<unsigned char>(*begin) != pattern_at(begin);
  return changed;
}

}  // namespace

void fence(const Extent& extent) {
  fill(extent.memory - kRedzoneBytes, extent.memory);
  fill(extent.memory + extent.asked, extent.memory + extent.size + kRedzoneBytes);
}

void poison(const Extent& extent) {
  fence(extent);
  std::memset(extent.memory, kPoison, extent.asked);
}

std::string violation(const Extent& extent) {
  const char* end = extent.memory + extent.size;
  const size_t before = count_changed(extent.memory - kRedzoneBytes, extent.memory);
  const size_t behind = count_changed(extent.memory + extent.asked, end + kRedzoneBytes);
  if (before + behind == 0) return "";
  return c10::str("redzone violated: ", before, " bytes were written before and ", behind,
                  " after a block of ", extent.asked, " bytes");
}

}  // namespace penstock::sim
