#include "src/mem/tiers.h"

namespace penstock::mem {

void Tiers::close_disk() {
  if (!disk) return;
  for (const char* address : disk->end()) {
    device.keep(address);
    host.keep(address);
  }
  disk.reset();
}

}  // namespace penstock::mem
