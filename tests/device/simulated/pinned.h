#pragma once
// Simulated page-locked host memory, which asynchronous copies need. Usable from any thread.
#include <ATen/core/CachingHostAllocator.h>

namespace penstock::sim {

at::HostAllocator& pinned_allocator();

bool is_pinned(const void* pointer);

}  // namespace penstock::sim
