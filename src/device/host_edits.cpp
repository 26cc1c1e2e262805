// take_edits() and first_edit(): compare low-precision values with the wider values from which they
// were rounded.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "src/device/host_kernels.h"
#include "src/device/split.h"

namespace penstock::device::host {

namespace {

constexpr int64_t kTile = 2048;  // elements whose rounded values fit in the first-level cache

// Calls `edited(begin, rounded, count)` for each tile that differs from the rounded values of
// `kept`.
template <class Edited>
void compare(const void* kept, Dtype kept_dtype, const void* values, Dtype dtype, int64_t numel,
             const Edited& edited) {
  const int64_t size = dtype_bytes(dtype), kept_size = dtype_bytes(kept_dtype);
  for_each_part(numel, [&](int64_t begin, int64_t end) {
    alignas(64) char rounded[kTile * sizeof(float)];
    for (int64_t at = begin; at < end; at += kTile) {
      const int64_t count = std::min(kTile, end - at);
      take(rounded, dtype, static_cast<const char*>(kept) + at * kept_size, kept_dtype, count,
           false);
      const char* seen = static_cast<const char*>(values) + at * size;
      if (std::memcmp(rounded, seen, static_cast<size_t>(count * size)) == 0) continue;
      edited(at, rounded, count);
    }
  });
}

}  // namespace

void take_edits(void* kept, Dtype kept_dtype, const void* values, Dtype dtype, int64_t numel) {
  const int64_t size = dtype_bytes(dtype), kept_size = dtype_bytes(kept_dtype);
  compare(kept, kept_dtype, values, dtype, numel,
          [&](int64_t begin, const char* rounded, int64_t count) {
            const char* seen = static_cast<const char*>(values) + begin * size;
            char* out = static_cast<char*>(kept) + begin * kept_size;
            for (int64_t i = 0; i < count; ++i) {
              if (std::memcmp(rounded + i * size, seen + i * size, static_cast<size_t>(size)) == 0)
                continue;
              take(out + i * kept_size, kept_dtype, seen + i * size, dtype, 1, false);
            }
          });
}

void take_edits(float* kept, const void* values, const void* base, Dtype dtype, int64_t numel) {
  const int64_t size = dtype_bytes(dtype);
  const auto in_fp32 = [&](const char* value) {
    float wide = 0.0F;
    take(&wide, Dtype::kFp32, value, dtype, 1, false);
    return wide;
  };
  const auto taken = [&](int64_t begin, const char* published, int64_t count) {
    const char* seen = static_cast<const char*>(values) + begin * size;
    for (int64_t i = 0; i < count; ++i) {
      if (std::memcmp(published + i * size, seen + i * size, static_cast<size_t>(size)) == 0)
        continue;
      alignas(float) char rounded[sizeof(float)];
      float& master = kept[begin + i];
      take(rounded, dtype, &master, Dtype::kFp32, 1, false);
      const float unsent = in_fp32(rounded) - in_fp32(published + i * size);
      const float value = in_fp32(seen + i * size);
      master = std::isfinite(unsent) ? value + unsent : value;
    }
  };
  compare(base, dtype, values, dtype, numel, taken);
}

int64_t first_edit(const void* kept, Dtype kept_dtype, const void* values, Dtype dtype,
                   int64_t numel) {
  const int64_t size = dtype_bytes(dtype);
  std::atomic<int64_t> first{numel};
  compare(kept, kept_dtype, values, dtype, numel,
          [&](int64_t begin, const char* rounded, int64_t count) {
            const char* seen = static_cast<const char*>(values) + begin * size;
            const char* end = rounded + count * size;
            const auto place = std::mismatch(rounded, end, seen).first - rounded;
            int64_t found = begin + place / size, least = first.load();
            while (found < least && !first.compare_exchange_weak(least, found)) {
            }
          });
  return first == numel ? -1 : first.load();
}

}  // namespace penstock::device::host
