// A plugin that the loader must refuse, for its tests: the interface has another version, or there
// is no code for the device.
#include "src/optim/fused_plugin.h"

#define PENSTOCK_FUSED_EXPORT extern "C" __attribute__((visibility("default")))

PENSTOCK_FUSED_EXPORT int penstock_fused_version() { return PENSTOCK_USELESS_VERSION; }

PENSTOCK_FUSED_EXPORT int penstock_fused_check() { return 209; }

PENSTOCK_FUSED_EXPORT int penstock_fused_launch(const PenstockFusedRun*, int64_t,
                                                const PenstockFusedAdam*, void*) {
  return 209;
}

PENSTOCK_FUSED_EXPORT const char* penstock_fused_error(int) { return "no kernel image"; }
