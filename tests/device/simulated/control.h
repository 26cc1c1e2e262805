#pragma once
// Switches and counters of the simulated accelerator. Like the device, they belong to the process.
// Any thread may call them.
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#define PENSTOCK_SIM_API __attribute__((visibility("default")))

namespace penstock::sim {

constexpr int kDevices = 8;

struct Tally {
  int64_t count = 0;
  int64_t bytes = 0;
};

// Counts since the last reset. Work is counted when it is issued, so the counts do not depend on
// the delays.
struct Counters {
  int64_t kernels = 0;  // operators; copies and collectives have their own counts
  // The bytes of device memory that kernels and copies on the device read and write, computed from
  // their tensors. `traffic.count` is the number of these kernels and copies. The names are the
  // names of operators, and "copy".
  Tally traffic;
  std::map<std::string, Tally> traffic_by_name;
  // Device memory for tensors: results of operators, empty tensors, and the copies of arguments
  // that some of CUDA's kernels make first. Memory from c10::Allocator, such as an arena's, is not
  // counted. The peak of all memory in use is that of the allocator's statistics.
  Tally temporaries;
  // Calls that may make the host wait for the device, even if there was nothing to wait for:
  // "stream", "event", "device", "copy_h2d", "copy_d2h", "item", "generator", "barrier",
  // "operator NAME" for an operator that cannot run asynchronously here, "allocator" for device
  // memory that the cache does not have, and "pinned" for new pinned memory.
  int64_t host_waits = 0;
  std::map<std::string, int64_t> host_waits_by_name;
  int64_t new_events = 0;
  Tally h2d, d2h, d2d;
  // The bytes of a collective are those of its input or of its output, whichever is larger.
  Tally collectives;
  std::map<std::string, Tally> collectives_by_name;
  // The last 100 operators that ran synchronously, the newest last.
  std::vector<std::string> synchronous_operators;
};

PENSTOCK_SIM_API Counters counters();
PENSTOCK_SIM_API void reset_counters();

// Restarts the random delays of all streams. The same seed and calls give the same delays.
PENSTOCK_SIM_API void set_seed(uint64_t seed);

// Each task of a stream waits for uniform(low, high) us times a factor, which is 0 (half of the
// time), 1 or 8 and changes after 1 to 12 tasks. high_us = 0: no delays.
PENSTOCK_SIM_API void set_delays_us(int64_t low_us, int64_t high_us);

// Sets how much the allocator may reserve on a device (-1: on each device). Initially 4 GiB.
PENSTOCK_SIM_API void set_memory_limit(size_t bytes, int device = -1);

// While this is set, every new allocation of pinned memory fails.
PENSTOCK_SIM_API void set_pinning_fails(bool fails);

// Makes new pinned memory begin `bytes` bytes after the beginning of a page. CUDA's pinned memory
// does so (16 bytes) with pinned_use_cuda_host_register.
PENSTOCK_SIM_API void set_pinned_offset(size_t bytes);

// While this is set, the host waits for all streams of all devices whenever new device memory or
// new pinned memory comes from the system, as with CUDA. This wait would hide that other waits are
// missing. So by default it is only counted, and not made.
PENSTOCK_SIM_API void set_allocations_wait(bool wait);

// Returns the bytes of pinned memory in use. Each allocation counts as the next power of two.
PENSTOCK_SIM_API size_t pinned_bytes();

// Calls `hook` on the issuing thread whenever a collective is issued. Null: no hook.
PENSTOCK_SIM_API void set_issue_hook(void (*hook)());

// Before a thread issues a collective, it sleeps for uniform(0, high) us. So the order in which
// threads of a process issue collectives changes each time, unless the threads wait for each other.
PENSTOCK_SIM_API void set_issue_delay_us(int64_t high);

// While this is set, a non_blocking copy between the device and host memory that is not pinned does
// not wait. Machines whose devices can read all of the host's memory behave like this.
PENSTOCK_SIM_API void set_pageable_copies_are_late(bool late);

// Waits for the device and checks the redzones of all blocks in use. (A block's redzones are also
// checked when the block is freed and when it is reused.) Throws if one was overwritten.
PENSTOCK_SIM_API void check_redzones(int device);

// Queues a kernel that writes four bytes to a wrong address, `device_address`.
PENSTOCK_SIM_API void write_wrongly(uint64_t device_address);

// An asynchronous error stays: every later synchronization and allocation on the device throws it,
// until this is called.
PENSTOCK_SIM_API void reset_errors();

// Returns the devices on which this process has a context. (On a GPU, each context takes half a
// gigabyte.)
PENSTOCK_SIM_API std::vector<int> contexts();
PENSTOCK_SIM_API void forget_contexts();  // contexts() then starts from an empty list

// Waits for all devices, and throws nothing. For use before the process ends.
PENSTOCK_SIM_API void drain();

// Returns whether this process was forked from one that uses the device. If so, the device cannot
// be used here.
PENSTOCK_SIM_API bool is_forked();

}  // namespace penstock::sim
