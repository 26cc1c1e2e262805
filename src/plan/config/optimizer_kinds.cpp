#include "penstock/optimizer_kinds.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

bool same_but_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](unsigned char x, unsigned char y) {
    return std::tolower(x) == std::tolower(y);
  });
}

}  // namespace

// The field and the limit of each key, for every reader of a config. A new key needs a row here.
std::span<const OptimizerKey> optimizer_keys() {
  static const OptimizerKey kKeys[] = {
      {"lr", &OptimizerConfig::lr},
      {"betas", &OptimizerConfig::betas},
      {"eps", &OptimizerConfig::eps},
      {"weight_decay", &OptimizerConfig::weight_decay},
      {"momentum", &OptimizerConfig::momentum},
      {"dampening", &OptimizerConfig::dampening, -HUGE_VAL},
      {"nesterov", &OptimizerConfig::nesterov},
      {"lr_decay", &OptimizerConfig::lr_decay},
      {"moments_dtype", &OptimizerConfig::moments_dtype},
      {"layout", &OptimizerConfig::layout},
  };
  return kKeys;
}

const OptimizerKey& optimizer_key(std::string_view name) {
  for (const OptimizerKey& key : optimizer_keys())
    if (key.name == name) return key;
  throw Bug(concat("[plan::optimizer_key] no key \"", name, "\""));
}

bool OptimizerKind::takes(std::string_view key) const {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// Defaults are the same as in torch.optim. The defaults of Lion are from its paper
// (arXiv:2302.06675).
std::span<const OptimizerKind> optimizer_kinds() {
  using enum OptimizerType;
  static const OptimizerKind kKinds[] = {
      {.name = "AdamW",
       .keys = {"lr", "weight_decay", "betas", "eps", "moments_dtype", "layout"},
       .defaults = {.type = kAdamW, .weight_decay = 0.01},
       .moments = {"exp_avg", "exp_avg_sq"},
       .decoupled_decay = true,
       .counts_steps = true},
      {.name = "Adam",
       .keys = {"lr", "weight_decay", "betas", "eps", "moments_dtype", "layout"},
       .defaults = {.type = kAdam, .weight_decay = 0.0},
       .moments = {"exp_avg", "exp_avg_sq"},
       .counts_steps = true},
      {.name = "SGD",
       .keys = {"lr", "weight_decay", "momentum", "dampening", "nesterov", "moments_dtype",
                "layout"},
       .defaults = {.type = kSgd, .weight_decay = 0.0},
       .moments = {"momentum_buffer"},
       .needs_momentum = true},
      // There is no moments_dtype: the sum only grows, and in bf16 it would soon stop changing.
      {.name = "Adagrad",
       .keys = {"lr", "weight_decay", "eps", "lr_decay", "layout"},
       .defaults = {.type = kAdagrad, .lr = 1e-2, .eps = 1e-10, .weight_decay = 0.0},
       .moments = {"sum"},
       .counts_steps = true},
      {.name = "Lion",
       .keys = {"lr", "weight_decay", "betas", "moments_dtype", "layout"},
       .defaults = {.type = kLion, .lr = 1e-4, .betas = {0.9, 0.99}, .weight_decay = 0.0},
       .moments = {"exp_avg"},
       .decoupled_decay = true},
  };
  static_assert(std::size(kKinds) == kNumOptimizerTypes, "one row for each OptimizerType");
  return kKinds;
}

const OptimizerKind& kind_of(OptimizerType type) {
  const auto index = static_cast<size_t>(type);
  PENSTOCK_ASSERT(
      index < optimizer_kinds().size() && optimizer_kinds()[index].defaults.type == type,
      concat("[plan::kind_of] no row for optimizer type ", index));
  return optimizer_kinds()[index];
}

const OptimizerKind* find_optimizer(std::string_view name) {
  for (const OptimizerKind& kind : optimizer_kinds())
    if (same_but_case(kind.name, name)) return &kind;
  return nullptr;
}

// SGD without momentum keeps only the master.
int num_moments(const OptimizerConfig& optimizer) {
  const OptimizerKind& kind = kind_of(optimizer.type);
  return kind.needs_momentum && optimizer.momentum == 0.0 ? 0 : kind.num_moments();
}

}  // namespace penstock
