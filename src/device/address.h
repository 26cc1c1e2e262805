#pragma once
// Address: a byte in host memory or in a device's memory. Only work queued on the device may read
// the device's memory.
#include <cstdint>

#include "penstock/error.h"

namespace penstock::device {

class Device;

struct Address {
  Address() = default;
  // NOLINTNEXTLINE(google-explicit-constructor)
  Address(void* at, const Device* where = nullptr) : data(static_cast<char*>(at)), device(where) {}

  char* data = nullptr;
  const Device* device = nullptr;  // null: host memory

  Address operator+(int64_t bytes) const { return {data + bytes, device}; }
  explicit operator bool() const { return data != nullptr; }
  bool operator==(const Address& other) const { return data == other.data; }
  bool operator!=(const Address& other) const { return data != other.data; }

  // Returns a pointer to host memory, for a caller that reads or writes this memory itself.
  char* host() const {
    PENSTOCK_ASSERT(device == nullptr, "[device::Address] the host reads a device's memory");
    return data;
  }
};

}  // namespace penstock::device
