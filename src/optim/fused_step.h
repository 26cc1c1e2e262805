#pragma once
// Runs Adam and AdamW on a GPU in one pass over memory, if the optional plugin libpenstock_cuda.so
// exists (plugins/penstock_cuda). The plugin is next to libpenstock.so, or at the path in
// PENSTOCK_CUDA_PLUGIN; if this variable is set but empty, no plugin is used. A process opens the
// plugin once and never closes it. If the file cannot be used, one warning says why. Callable from
// any thread.
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "penstock/config.h"
#include "src/optim/fused_plugin.h"
#include "src/optim/optimizer_step.h"

namespace penstock::optim {

// The factor of the gradients: the product, in fp32, of a factor that the host knows and one that
// was computed on the device.
struct FusedScale {
  float host = 1.0F;
  const float* device = nullptr;  // null: a factor of 1
  const float* found_inf =
      nullptr;  // on the device; a value other than 0 prevents the update. May be null
};

// The functions of an open plugin. Copies refer to the same plugin.
class FusedPlugin {
 public:
  // Opens the file at `path`. If it is no plugin of this version, sets `why` and returns nothing.
  static std::optional<FusedPlugin> open(const std::string& path, std::string& why);
  // Returns the plugin of this process; null if there is none.
  static const FusedPlugin* of_process();

  // Returns why the plugin cannot compute on the calling thread's current device; "" if it can.
  std::string why_not_here() const;
  // Queues the update of all runs on `stream`, in a few launches. Throws RuntimeFault if that
  // fails.
  void launch(std::span<const PenstockFusedRun> runs, const PenstockFusedAdam& adam,
              void* stream) const;

 private:
  PenstockFusedCheck check_ = nullptr;
  PenstockFusedLaunch launch_ = nullptr;
  PenstockFusedError error_ = nullptr;
};

// Updates the runs of one parameter group, which must be on one device. Does nothing and returns
// false unless the optimizer is Adam or AdamW and the plugin can compute on this CUDA or HIP
// device. All runs make the same `step`, which is 1 for the first update and does not count steps
// that found_inf prevented (StepRun::step is not read). The work is queued on the calling thread's
// stream.
bool run_fused(const OptimizerConfig& group, std::span<const StepRun> runs, const FusedScale& scale,
               int64_t step);

}  // namespace penstock::optim
