#include "src/ckpt/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <charconv>

namespace penstock::ckpt {

namespace {

constexpr size_t kDigits = 16;

}  // namespace

uint64_t checksum(const void* data, int64_t bytes) {
  return XXH3_64bits(data, static_cast<size_t>(bytes));
}

std::string hex(uint64_t value) {
  std::string text(kDigits, '0');
  for (size_t i = kDigits; i > 0; --i, value >>= 4) text[i - 1] = "0123456789abcdef"[value & 15];
  return text;
}

std::optional<uint64_t> parse_hex(std::string_view text) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value, 16);
  if (text.size() != kDigits || error != std::errc() || at != end || hex(value) != text) return {};
  return value;
}

}  // namespace penstock::ckpt
