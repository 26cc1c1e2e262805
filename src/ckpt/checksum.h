#pragma once
// Checksums: 64-bit XXH3. They detect data that was damaged on the way between memory and disk.
// They do not protect against an attacker.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace penstock::ckpt {

uint64_t checksum(const void* data, int64_t bytes);
uint64_t checksum(const at::Tensor& tensor);  // checksum of the values in row-major order

// Computes the checksum of bytes that are added part by part, in order.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();

  void add(const void* data, int64_t bytes);
  uint64_t value() const;  // of all bytes so far

 private:
  struct Hash;
  std::unique_ptr<Hash> state_;
};

std::string hex(uint64_t value);  // 16 digits

}  // namespace penstock::ckpt
