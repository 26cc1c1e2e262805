#pragma once
// The caching allocator of device memory, registered with torch for the device. Usable from any
// thread.
#include <c10/core/CachingDeviceAllocator.h>

namespace penstock::sim {

c10::DeviceAllocator& device_allocator();
// Updates the peaks in the statistics for a kernel that takes these bytes while it runs.
void note_temporary(int device, size_t bytes);
// Throws if these bytes of device memory are not inside one block in use.
void check_bounds(void* begin, size_t bytes);

}  // namespace penstock::sim
