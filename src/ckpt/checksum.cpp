#include "src/ckpt/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace penstock::ckpt {

namespace {

constexpr size_t kDigits = 16;

}  // namespace

uint64_t checksum(const void* data, int64_t bytes) {
  return XXH3_64bits(data, static_cast<size_t>(bytes));
}

uint64_t checksum(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.detach().contiguous();
  return checksum(whole.const_data_ptr(), static_cast<int64_t>(whole.nbytes()));
}

std::string hex(uint64_t value) {
  std::string text(kDigits, '0');
  for (size_t i = kDigits; i > 0; --i, value >>= 4) text[i - 1] = "0123456789abcdef"[value & 15];
  return text;
}

}  // namespace penstock::ckpt
