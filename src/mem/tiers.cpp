#include "src/mem/tiers.h"

namespace penstock::mem {

Tiers::Tiers(c10::Device where, int64_t events)
    : computes(where),
      memory(computes.is_host() ? MemoryKind::kHost : MemoryKind::kPinned, computes),
      accelerator(MemoryKind::kDevice, computes),
      device(computes.is_host() ? memory : accelerator),
      host(memory),
      recorder(std::make_shared<trace::Recorder>(events)) {}

int64_t Tiers::peak() const {
  return computes.is_host() ? memory.peak() : device.usage().total_peak + host.usage().total_peak;
}

void Tiers::close_disk() {
  if (!disk) return;
  // An address does not show which arena it belongs to, so both arenas keep it.
  for (const char* address : disk->end()) {
    device.keep(address);
    host.keep(address);
  }
  disk.reset();
}

}  // namespace penstock::mem
