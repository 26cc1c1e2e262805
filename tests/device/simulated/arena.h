#pragma once
// Device memory. The device pointers are addresses in a range that is inaccessible. The actual
// memory lies at a constant distance from them, and only work on a stream accesses it. The host
// faults if it dereferences a device pointer, even while a kernel runs.
#include <c10/core/Device.h>

#include <cstddef>

namespace penstock::sim {

constexpr size_t kArenaBytes = size_t{16} << 30;  // of addresses, on each device

// The first device pointer of a device.
char* arena(int device);

// Returns the device to which a pointer belongs, or -1.
int device_of(const void* pointer);

// Returns the address that a kernel uses for a device pointer; null for null. Throws if `pointer`
// is not a device pointer.
void* shadow(const void* pointer);

inline c10::Device sim_device(int index) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace penstock::sim
