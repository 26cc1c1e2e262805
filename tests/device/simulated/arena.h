#pragma once
// Device memory: one range of addresses that nobody may access, which are the device pointers, and
// beside it, at a constant distance, the memory they stand for. Only what runs on a stream goes
// there, so the host faults on every device pointer, also while a kernel runs.
#include <c10/core/Device.h>

#include <cstddef>

namespace penstock::sim {

constexpr size_t kArenaBytes = size_t{16} << 30;  // of addresses, on each device

// The first device pointer of a device.
char* arena(int device);

// The device a pointer belongs to, or -1.
int device_of(const void* pointer);

// What a kernel uses for a device pointer; null for null. Throws on what is none: a stray pointer.
void* shadow(const void* pointer);

inline c10::Device sim_device(int index) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace penstock::sim
