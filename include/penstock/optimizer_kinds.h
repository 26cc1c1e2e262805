#pragma once
// The optimizers that the engine implements. Each has one row: name, keys, defaults, state per
// parameter. Config, planner, engine and Python read these rows; the kernel of each optimizer is a
// row of src/optim/optimizer_step.cpp. Plain values, usable from any thread.
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "penstock/config.h"
#include "penstock/export.h"

namespace penstock {

// A key of the config's "optimizer" section, except "type", and the field that it sets.
struct OptimizerKey {
  std::string name;
  std::variant<double OptimizerConfig::*, bool OptimizerConfig::*, std::string OptimizerConfig::*,
               std::array<double, 2> OptimizerConfig::*>
      field;
  double least = 0.0;  // smallest allowed number
};
PENSTOCK_API std::span<const OptimizerKey> optimizer_keys();
PENSTOCK_API const OptimizerKey& optimizer_key(std::string_view name);  // throws Bug

struct PENSTOCK_API OptimizerKind {
  std::string name;  // matched without regard to case
  std::vector<std::string>
      keys;                  // names in optimizer_keys(); with "moments_dtype", moments may be bf16
  OptimizerConfig defaults;  // `type` is this optimizer
  // torch's names for the values kept per parameter in addition to the master; "": none.
  std::array<std::string_view, 2> moments{};
  bool needs_momentum = false;   // no moments are kept while `momentum` is 0
  bool decoupled_decay = false;  // weight decay is not added to the gradient
  bool counts_steps = false;     // torch keeps a "step" per parameter

  bool takes(std::string_view key) const;
  int num_moments() const { return moments[0].empty() ? 0 : moments[1].empty() ? 1 : 2; }
};

// Indexed by OptimizerType.
PENSTOCK_API std::span<const OptimizerKind> optimizer_kinds();
PENSTOCK_API const OptimizerKind& kind_of(OptimizerType type);
// Returns null if there is no such optimizer.
PENSTOCK_API const OptimizerKind* find_optimizer(std::string_view name);

// Returns the number of values kept per parameter in addition to the master.
PENSTOCK_API int num_moments(const OptimizerConfig& optimizer);

}  // namespace penstock
