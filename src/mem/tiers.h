#pragma once
// Tiers: where state rests. On the CPU the device tier is host memory that is counted on its own.
#include <optional>

#include "src/mem/arena.h"
#include "src/mem/disk.h"
#include "src/place/placement.h"

namespace penstock::mem {

struct Tiers {
  // This version computes on the CPU: both tiers share its memory.
  Tiers() : device(memory), host(memory) {}

  // What is on its way to or from disk is in host memory.
  Arena& arena(Tier tier) { return tier == Tier::kDevice ? device : host; }
  // Ends the disk while the buffers of its requests are still taken. Those of a disk that hangs
  // stay allocated when they are given back.
  void close_disk();

  Pool memory{c10::Device(c10::DeviceType::CPU)};
  Arena device, host;
  std::optional<Disk> disk;  // where the table has cells there
};

}  // namespace penstock::mem
