#pragma once
// What memory there is: read from the system, for budgets that nobody set.
#include <cstdint>
#include <string>
#include <vector>

namespace penstock::mem {

// Host memory that this process may still take: what the kernel calls available, or what the limits
// of its control groups leave, whichever is less. Page cache that can be dropped is free. `root` is
// the file system's, but in tests. Throws RuntimeFault where there is no /proc/meminfo.
int64_t free_host_bytes(const std::string& root = "/");

// Free space of the folders together, each file system counted once. Folders that do not exist
// have none.
int64_t free_disk_bytes(const std::vector<std::string>& folders);

}  // namespace penstock::mem
