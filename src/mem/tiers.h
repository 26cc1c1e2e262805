#pragma once
// Tiers: where state rests. On the CPU the device tier is host memory that is counted on its own.
#include <optional>

#include "src/mem/arena.h"
#include "src/mem/disk.h"
#include "src/place/placement.h"

namespace penstock::mem {

struct Tiers {
  explicit Tiers(c10::Device compute) : device(compute), host(c10::DeviceType::CPU) {}

  // What is on its way to or from disk is in host memory.
  Arena& arena(Tier tier) { return tier == Tier::kDevice ? device : host; }
  // Ends the disk while the buffers of its requests are still taken. Those of a disk that hangs
  // stay allocated when they are given back.
  void close_disk();

  Arena device, host;
  std::optional<Disk> disk;  // where the table has cells there
};

}  // namespace penstock::mem
