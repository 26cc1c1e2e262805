#pragma once
// The caching allocator of device memory, registered with torch for the device. Any thread.
#include <c10/core/CachingDeviceAllocator.h>

namespace penstock::sim {

c10::DeviceAllocator& device_allocator();
// Throws where those bytes of a device are not part of one block in use.
void check_bounds(void* begin, size_t bytes);

}  // namespace penstock::sim
