#pragma once
// Tiers: where state rests. On the CPU the device tier is host memory that is counted on its own.
#include <memory>
#include <optional>

#include "src/device/device.h"
#include "src/mem/arena.h"
#include "src/mem/disk.h"
#include "src/place/placement.h"
#include "src/trace/recorder.h"

namespace penstock::mem {

struct Tiers {
  // Where parameters compute. What of the host's memory goes to and from it is pinned, which is all
  // of it but what keep_here() names.
  // `events`: how many the recorder keeps.
  explicit Tiers(c10::Device where = c10::Device(c10::DeviceType::CPU), int64_t events = 0);

  // Before the first of it is taken: that account's host memory never crosses to the device.
  void keep_here(Account account) { host.use(account, pageable); }
  // What is on its way to or from disk is in host memory.
  Arena& arena(Tier tier) { return tier == Tier::kDevice ? device : host; }
  // Whose memory that is; null for the host's.
  const device::Device* owner(Tier tier) const {
    return tier == Tier::kDevice && !computes.is_host() ? &computes : nullptr;
  }
  // What the host reads itself; of the device's budget where that is the host.
  Arena& on_host() { return computes.is_host() ? device : host; }
  // Ends the disk while the buffers of its requests are still taken. Those of a disk that hangs
  // stay allocated when they are given back.
  void close_disk();

  const device::Device computes;
  Pool memory;                 // where that is the host: of both tiers; else pinned
  Pool pageable, accelerator;  // where it is not
  Arena device, host;
  const std::shared_ptr<trace::Recorder> recorder;
  std::optional<Disk> disk;  // where the table has cells there
};

}  // namespace penstock::mem
