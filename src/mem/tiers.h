#pragma once
// Tiers: the memory and disk in which state rests. On the CPU, the device tier is host memory that
// is counted separately.
#include <memory>
#include <optional>

#include "src/device/device.h"
#include "src/mem/arena.h"
#include "src/mem/disk_tier.h"
#include "src/place/placement.h"
#include "src/trace/recorder.h"

namespace penstock::mem {

struct Tiers {
  // `where` is the device on which the model computes. With a device, host memory is pinned, except
  // for the accounts passed to keep_here(). `events` is the number of events that the recorder
  // keeps.
  explicit Tiers(c10::Device where = c10::Device(c10::DeviceType::CPU), int64_t events = 0);

  // Makes host memory of that account pageable, because it is never copied to the device. Call it
  // before the account's first take().
  void keep_here(Account account) { host.use(account, pageable); }
  // Values on disk pass through host memory, so kDisk returns the host's arena.
  Arena& arena(Tier tier) { return tier == Tier::kDevice ? device : host; }
  // Returns the device that owns memory of that tier; null for host memory.
  const device::Device* owner(Tier tier) const {
    return tier == Tier::kDevice && !computes.is_host() ? &computes : nullptr;
  }
  // Returns the arena for values that the host reads. On the CPU, this is the device tier's arena,
  // and its bytes count towards the device budget.
  Arena& on_host() { return computes.is_host() ? device : host; }
  // Returns the most bytes that were in use at one time on the device and in host memory together.
  // If the device has its own memory, the result is the sum of two peaks.
  int64_t peak() const;
  // Ends the disk. Must be called before the buffers of its requests are freed. The buffers of
  // hanging requests are never freed.
  void close_disk();

  const device::Device computes;
  Pool memory;                 // memory of both tiers on the CPU; pinned host memory with a device
  Pool pageable, accelerator;  // used with a device only
  Arena device, host;
  const std::shared_ptr<trace::Recorder> recorder;
  std::optional<Disk> disk;  // only if the table has cells on disk
};

}  // namespace penstock::mem
