#include "src/optim/fused_step.h"

#include <dlfcn.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/text.h"
#include "src/device/device.h"

namespace penstock::optim {

namespace {

static_assert(static_cast<int>(Dtype::kFp32) == kPenstockFusedFp32 &&
                  static_cast<int>(Dtype::kBf16) == kPenstockFusedBf16 &&
                  static_cast<int>(Dtype::kFp16) == kPenstockFusedFp16,
              "the plugin's codes of dtypes");

template <class Function>
Function find_symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

// Returns the path of a plugin next to this library, or next to a program that contains it.
std::filesystem::path path_next_to_library() {
  Dl_info here{};
  const auto* const inside = reinterpret_cast<const void*>(&run_fused);
  if (dladdr(inside, &here) == 0 || here.dli_fname == nullptr) return {};
  const std::filesystem::path library = here.dli_fname;
  if (!library.has_parent_path()) return {};
  return std::filesystem::absolute(library).parent_path() / "libpenstock_cuda.so";
}

std::optional<FusedPlugin> find_plugin() {
  const char* const chosen = std::getenv("PENSTOCK_CUDA_PLUGIN");
  const std::filesystem::path path = chosen == nullptr ? path_next_to_library() : chosen;
  std::error_code unknown;
  if (path.empty() || (chosen == nullptr && !std::filesystem::exists(path, unknown))) {
    return std::nullopt;
  }
  std::string why;
  std::optional<FusedPlugin> plugin = FusedPlugin::open(path.string(), why);
  if (!plugin) {
    TORCH_WARN("penstock: the plugin ", path.string(), " is not used: ", why,
               ". Adam runs as separate operations, which is slower but gives the same results. "
               "Build the plugin again (make cuda-plugin), or set PENSTOCK_CUDA_PLUGIN to the "
               "path of a plugin, or to nothing to run without one");
  }
  return plugin;
}

PenstockFusedRun plain(const StepRun& run) {
  const Range& range = run.range;
  return {range.master,
          range.grad,
          run.moment1,
          run.moment2,
          range.param_out,
          range.numel,
          static_cast<int32_t>(range.grad_dtype),
          static_cast<int32_t>(range.moment_dtype),
          static_cast<int32_t>(range.param_dtype)};
}

PenstockFusedAdam plain(const OptimizerConfig& group, const FusedScale& scale, int64_t step) {
  return {group.lr,
          group.betas[0],
          group.betas[1],
          group.eps,
          group.weight_decay,
          step,
          kind_of(group.type).decoupled_decay ? 1 : 0,
          scale.host,
          scale.device,
          scale.found_inf};
}

// Returns the plugin if it computes on `where`, the calling thread's current device.
const FusedPlugin* plugin_on(c10::Device where) {
  const FusedPlugin* const plugin = FusedPlugin::of_process();
  if (plugin == nullptr) return nullptr;
  const std::string why = plugin->why_not_here();
  if (why.empty()) return plugin;
  TORCH_WARN_ONCE("penstock: the plugin libpenstock_cuda.so is not used on ", where, ": ", why,
                  ". Build it for this device and its driver (make cuda-plugin)");
  return nullptr;
}

}  // namespace

std::optional<FusedPlugin> FusedPlugin::open(const std::string& path, std::string& why) {
  // The handle is never closed, because the device may still run kernels when the process ends.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const text = dlerror();
    why = text == nullptr ? "it cannot be opened" : text;
    return std::nullopt;
  }
  const auto version = find_symbol<PenstockFusedVersion>(library, PENSTOCK_FUSED_VERSION_SYMBOL);
  FusedPlugin plugin;
  plugin.check_ = find_symbol<PenstockFusedCheck>(library, PENSTOCK_FUSED_CHECK_SYMBOL);
  plugin.launch_ = find_symbol<PenstockFusedLaunch>(library, PENSTOCK_FUSED_LAUNCH_SYMBOL);
  plugin.error_ = find_symbol<PenstockFusedError>(library, PENSTOCK_FUSED_ERROR_SYMBOL);
  if (version == nullptr) {
    why = concat("it has no function ", PENSTOCK_FUSED_VERSION_SYMBOL);
  } else if (version() != PENSTOCK_FUSED_VERSION) {
    why = concat("it has version ", version(), " of the interface, and the engine has version ",
                 PENSTOCK_FUSED_VERSION);
  } else if (!plugin.check_ || !plugin.launch_ || !plugin.error_) {
    why = "it lacks functions of the interface";
  } else {
    return plugin;
  }
  return std::nullopt;
}

const FusedPlugin* FusedPlugin::of_process() {
  static const std::optional<FusedPlugin> kPlugin = find_plugin();
  return kPlugin ? &*kPlugin : nullptr;
}

std::string FusedPlugin::why_not_here() const {
  const int code = check_();
  return code == 0 ? "" : error_(code);
}

void FusedPlugin::launch(std::span<const PenstockFusedRun> runs, const PenstockFusedAdam& adam,
                         void* stream) const {
  const int code = launch_(runs.data(), static_cast<int64_t>(runs.size()), &adam, stream);
  if (code == 0) return;
  throw RuntimeFault(concat("[optim::run_fused] the kernel of libpenstock_cuda.so that updates ",
                            runs.size(), " runs in step ", adam.step,
                            " was not started: ", error_(code), " (code ", code,
                            "). Set PENSTOCK_CUDA_PLUGIN to nothing to run without the plugin"));
}

bool run_fused(const OptimizerConfig& group, std::span<const StepRun> runs, const FusedScale& scale,
               int64_t step) {
  const bool is_adam = group.type == OptimizerType::kAdam || group.type == OptimizerType::kAdamW;
  if (!is_adam || runs.empty() || runs.front().range.device == nullptr) return false;
  const device::Device& device = *runs.front().range.device;
  if (!device.where().is_cuda() && !device.where().is_hip()) return false;
  const c10::DeviceGuard guard(device.where());
  const FusedPlugin* const plugin = plugin_on(device.where());
  if (plugin == nullptr) return false;
  std::vector<PenstockFusedRun> list;
  list.reserve(runs.size());
  for (const StepRun& run : runs) {
    PENSTOCK_ASSERT(run.range.device == &device, "[optim::run_fused] runs on several devices");
    list.push_back(plain(run));
  }
  plugin->launch(list, plain(group, scale, step), device.current().native_handle());
  return true;
}

}  // namespace penstock::optim
