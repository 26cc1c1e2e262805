#include <ATen/Context.h>

#include <cstdlib>
#include <string>

#include "tests/device/simulated/control.h"
#include "tests/parity/tables/training.h"

namespace penstock::tables {

// Returns the rank's own device. PENSTOCK_SIM_SEED seeds the delays of the devices.
c10::Device place_of(int rank) {
  at::globalContext().lazyInitDevice(c10::DeviceType::PrivateUse1);
  if (rank == 0) {
    const char* seed = std::getenv("PENSTOCK_SIM_SEED");
    sim::set_seed(seed == nullptr ? 1 : std::stoull(seed));
    sim::set_delays_us(0, 50);
  }
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(rank)};
}

}  // namespace penstock::tables
