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
  const at::Tensor whole = tensor.detach().cpu().contiguous();
  return checksum(whole.const_data_ptr(), static_cast<int64_t>(whole.nbytes()));
}

struct RunningChecksum::Hash {
  XXH3_state_t xxh3{};
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<Hash>()) {
  XXH3_64bits_reset(&state_->xxh3);
}

RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::add(const void* data, int64_t bytes) {
  XXH3_64bits_update(&state_->xxh3, data, static_cast<size_t>(bytes));
}

uint64_t RunningChecksum::value() const { return XXH3_64bits_digest(&state_->xxh3); }

std::string hex(uint64_t value) {
  std::string text(kDigits, '0');
  for (size_t i = kDigits; i > 0; --i, value >>= 4) text[i - 1] = "0123456789abcdef"[value & 15];
  return text;
}

}  // namespace penstock::ckpt
