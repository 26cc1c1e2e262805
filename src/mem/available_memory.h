#pragma once
// Reads from the system how much memory is available, for budgets that the config does not set.
#include <cstdint>
#include <string>
#include <vector>

namespace penstock::mem {

// Returns the bytes of host memory that this process can still take. This is the kernel's
// MemAvailable or the room within the limits of the control groups, whichever is less. Page cache
// that can be dropped counts as free. `root` is the root of the file system; tests pass another
// folder. Throws RuntimeFault if /proc/meminfo cannot be read.
int64_t free_host_bytes(const std::string& root = "/");

// Returns the free bytes of all folders together; each file system is counted once. A folder that
// does not exist counts 0.
int64_t free_disk_bytes(const std::vector<std::string>& folders);

}  // namespace penstock::mem
