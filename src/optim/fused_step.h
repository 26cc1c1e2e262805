#pragma once
// Adam and AdamW on a GPU in one pass over memory, if the optional plugin libpenstock_cuda.so is
// there (plugins/penstock_cuda). The plugin is next to libpenstock.so, or at the path in
// PENSTOCK_CUDA_PLUGIN; if this variable is set but empty, no plugin is used. A process opens it
// once and never closes it. If the file cannot be used, one warning says why. Callable from any
// thread.
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
  // Opens the file at `path`. Returns nothing and sets `why` if it is no plugin of this version.
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

// Updates the runs of one parameter group if the plugin can: all runs are on the same CUDA or HIP
// device, and the optimizer is Adam or AdamW. Returns false, and does nothing, if it cannot. All
// runs make the same `step` (StepRun::step is not read), which is 1 for the first update; a step
// that found_inf prevented is not counted. The work is queued on the calling thread's stream.
bool run_fused(const OptimizerConfig& group, std::span<const StepRun> runs, const FusedScale& scale,
               int64_t step);

}  // namespace penstock::optim
