#pragma once
// Switches and counters of the simulated accelerator. They are the process's, as the device is; any
// thread may call them.
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

// Since the last reset. All is counted when it is issued, so the figures do not depend on the
// delays.
struct Counters {
  int64_t kernels = 0;  // operators; copies and collectives have figures of their own
  // Calls that may block the host for the device, whether or not there was something to wait for:
  // "stream", "event", "device", "copy_h2d", "copy_d2h", "item", "allocator", "generator",
  // "barrier" and "operator NAME" for an operator that cannot run asynchronously here.
  int64_t host_waits = 0;
  std::map<std::string, int64_t> host_waits_by_name;
  Tally h2d, d2h, d2d;
  // The bytes of a collective are those of the larger of what goes in and what comes out.
  Tally collectives;
  std::map<std::string, Tally> collectives_by_name;
  // The last 100 operators that ran synchronously, the newest last.
  std::vector<std::string> synchronous_operators;
};

PENSTOCK_SIM_API Counters counters();
PENSTOCK_SIM_API void reset_counters();

// Restarts the drawing of delays on all streams; the same seed and the same calls draw the same.
PENSTOCK_SIM_API void set_seed(uint64_t seed);

// Each task of a stream waits for uniform(low, high) us times a factor of 0, 0, 1 or 8 that the
// stream keeps for 1 to 12 tasks. high_us = 0: no delays.
PENSTOCK_SIM_API void set_delays_us(int64_t low_us, int64_t high_us);

// What the allocator may reserve on a device (-1: on each); 4 GiB at first.
PENSTOCK_SIM_API void set_memory_limit(size_t bytes, int device = -1);

// While set, every new allocation of pinned memory fails.
PENSTOCK_SIM_API void set_pinning_fails(bool fails);

// Waits for the device and verifies the redzones of all blocks in use: those of a block are
// verified anyway when it is freed and when it is used again. Throws what it finds.
PENSTOCK_SIM_API void check_redzones(int device);

// Queues a kernel with a wrong index, which writes four bytes there.
PENSTOCK_SIM_API void write_wrongly(uint64_t device_address);

// An asynchronous error stays: every later synchronization and allocation on the device throws it,
// until this is called.
PENSTOCK_SIM_API void reset_errors();

// The devices on which this process has a context: on a GPU each takes half a gigabyte.
PENSTOCK_SIM_API std::vector<int> contexts();
PENSTOCK_SIM_API void forget_contexts();  // counts from none again

// Waits for all devices and throws nothing; before the process ends.
PENSTOCK_SIM_API void drain();

// Whether this process was forked from one that uses the device: it can not be used here.
PENSTOCK_SIM_API bool is_forked();

}  // namespace penstock::sim
