#pragma once
// Page-locked host memory, so to speak: what asynchronous copies need. Any thread.
#include <ATen/core/CachingHostAllocator.h>

namespace penstock::sim {

at::HostAllocator& pinned_allocator();

bool is_pinned(const void* pointer);

}  // namespace penstock::sim
