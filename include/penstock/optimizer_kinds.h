#pragma once
// The optimizers that the engine computes, one row each: name, keys, defaults, what is kept per
// parameter. Whoever asks what an optimizer is (config, planner, engine, Python) reads these rows;
// the kernel that each one runs is a row of src/optim/optimizer_step.cpp. Pure values; any thread.
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "penstock/config.h"
#include "penstock/export.h"

namespace penstock {

// A key of the config's "optimizer" section, but for "type", and the field it sets.
struct OptimizerKey {
  std::string name;
  std::variant<double OptimizerConfig::*, bool OptimizerConfig::*, std::string OptimizerConfig::*,
               std::array<double, 2> OptimizerConfig::*>
      field;
  double least = 0.0;  // of a number
};
PENSTOCK_API std::span<const OptimizerKey> optimizer_keys();
PENSTOCK_API const OptimizerKey& optimizer_key(std::string_view name);  // throws Bug

struct PENSTOCK_API OptimizerKind {
  std::string name;               // in the config, in any case
  std::vector<std::string> keys;  // of optimizer_keys(); with "moments_dtype", moments may be bf16
  OptimizerConfig defaults;       // its `type` is this row's
  // What torch calls the values kept per parameter beside the master; "": there is none.
  std::array<std::string_view, 2> moments{};
  bool needs_momentum = false;   // for those: none are kept while `momentum` is 0
  bool decoupled_decay = false;  // weight decay is not part of the gradient

  bool takes(std::string_view key) const;
  int num_moments() const { return moments[0].empty() ? 0 : moments[1].empty() ? 1 : 2; }
};

// By OptimizerType.
PENSTOCK_API std::span<const OptimizerKind> optimizer_kinds();
PENSTOCK_API const OptimizerKind& kind_of(OptimizerType type);
// Null when there is none.
PENSTOCK_API const OptimizerKind* find_optimizer(std::string_view name);

// Values kept per parameter beside the master.
PENSTOCK_API int num_moments(const OptimizerConfig& optimizer);

}  // namespace penstock
