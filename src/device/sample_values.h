#pragma once
// For tests of kernels: values of any dtype, followed by guard bytes.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "src/place/placement.h"

namespace penstock::samples {

inline constexpr Dtype kDtypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16};
inline const std::vector<int64_t> kSizes = {0, 1, 7, 33, 1000, 100003};

// Reads one value of any dtype. c10's scalar casts convert it.
inline float read(const void* at, Dtype dtype, int64_t i) {
  if (dtype == Dtype::kBf16) return static_cast<const c10::BFloat16*>(at)[i];
  if (dtype == Dtype::kFp16) return static_cast<const c10::Half*>(at)[i];
  return static_cast<const float*>(at)[i];
}

inline float from_bits(uint16_t bits, Dtype dtype) {
  if (dtype == Dtype::kBf16) return c10::BFloat16(bits, c10::BFloat16::from_bits());
  return c10::Half(bits, c10::Half::from_bits());
}

inline void write(void* at, Dtype dtype, int64_t i, float value) {
  if (dtype == Dtype::kBf16) {
    static_cast<c10::BFloat16*>(at)[i] = value;
  } else if (dtype == Dtype::kFp16) {
    static_cast<c10::Half*>(at)[i] = value;
  } else {
    static_cast<float*>(at)[i] = value;
  }
}

// Values of `dtype` that start `offset` values into an allocation, followed by guard bytes.
class SampleValues {
 public:
  SampleValues(Dtype dtype, int64_t numel, int64_t offset = 0)
      : dtype_(dtype), numel_(numel), offset_(offset) {
    bytes_.assign(static_cast<size_t>((numel + offset) * dtype_bytes(dtype)) + kGuard, 0x5A);
  }
  SampleValues& randomize(uint32_t seed, float low, float high) {
    std::mt19937 engine(seed);
    std::uniform_real_distribution<float> value(low, high);
    for (int64_t i = 0; i < numel_; ++i) set(i, value(engine));
    return *this;
  }
  void* data() { return bytes_.data() + offset_ * dtype_bytes(dtype_); }
  const void* data() const { return bytes_.data() + offset_ * dtype_bytes(dtype_); }
  void* at(int64_t i) { return static_cast<char*>(data()) + i * dtype_bytes(dtype_); }
  float* floats() { return static_cast<float*>(data()); }
  float operator[](int64_t i) const { return read(data(), dtype_, i); }
  void set(int64_t i, float value) { write(data(), dtype_, i, value); }
  bool guard_intact() const {
    for (size_t i = bytes_.size() - kGuard; i < bytes_.size(); ++i)
      if (bytes_[i] != 0x5A) return false;
    return true;
  }
  bool same_bits(const SampleValues& other) const {
    return std::memcmp(data(), other.data(), static_cast<size_t>(numel_ * dtype_bytes(dtype_))) ==
           0;
  }

 private:
  static constexpr size_t kGuard = 128;
  Dtype dtype_;
  int64_t numel_, offset_;
  std::vector<unsigned char> bytes_;
};

class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

}  // namespace penstock::samples
