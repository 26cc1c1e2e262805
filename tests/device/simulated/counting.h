#pragma once
// The other files call these functions to update the counters of control.h. Usable from any thread.
#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock::sim {

enum class Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice };

// `bytes`: those that the kernel reads and writes.
void count_kernel(const std::string& name, size_t bytes);
void count_temporary(size_t bytes);
void count_new_event();
void count_host_wait(const std::string& name);
// `touched`: the bytes that a copy on the device reads and writes.
void count_copy(Direction direction, size_t bytes, size_t touched = 0);
void count_collective(const std::string& name, size_t bytes);
void count_synchronous_operator(const std::string& name);

}  // namespace penstock::sim
