#pragma once
// The tables that the plan tests run: every preset, every tier, and some that no preset has.
#include <optional>
#include <string>
#include <vector>

#include "src/base/text.h"
#include "src/plan/table.h"

namespace penstock::plans {

struct Cell {
  Role role;
  Phase phase;
  const char* place;
};

struct TableCase {
  std::string strategy;
  Tier optim_tier = Tier::kDevice;
  Tier param_tier = Tier::kDevice;
  Dtype precision = Dtype::kBf16;
  std::vector<Cell> cells{};  // the cells that differ from the preset
  int most_micro = 2;
  std::optional<Tier> grad_tier{};

  Table table(bool accumulate) const {
    Table table = preset(strategy, {.precision = precision,
                                    .accumulate = accumulate,
                                    .optim_tier = optim_tier,
                                    .param_tier = param_tier,
                                    .grad_tier = grad_tier});
    for (const Cell& cell : cells) table.set(cell.role, cell.phase, Placement::parse(cell.place));
    return table;
  }
  std::string text() const {
    return concat(strategy, " optim=", tier_name(optim_tier), " param=", tier_name(param_tier), " ",
                  dtype_name(precision),
                  grad_tier ? concat(" gradients on ", tier_name(*grad_tier)) : "",
                  cells.empty() ? "" : " with other cells");
  }
};

inline std::vector<TableCase> table_cases() {
  std::vector<TableCase> cases;
  for (const std::string& name : preset_names()) {
    cases.push_back({.strategy = name});
    cases.push_back({.strategy = name, .optim_tier = Tier::kHost});
    cases.push_back({.strategy = name, .precision = Dtype::kFp32});
  }
  for (const char* name : {"zero1", "zero3"})
    cases.push_back({.strategy = name, .optim_tier = Tier::kDisk});
  for (const char* name : {"zero3", "hpz", "mics"})
    for (const Tier tier : {Tier::kHost, Tier::kDisk}) {
      cases.push_back({.strategy = name, .param_tier = tier});
      cases.push_back({.strategy = name, .optim_tier = tier, .param_tier = tier});
    }
  for (const char* name : {"zero2", "zero3", "hpz", "mics"})
    cases.push_back({.strategy = name, .optim_tier = Tier::kDisk, .grad_tier = Tier::kDisk});
  // Parameters stay whole until the backward. There is only one micro-batch: after a backward that
  // is not the last, parameters return to `hold`, but the next forward starts from `rest` and would
  // gather them again.
  cases.push_back({.strategy = "zero3",
                   .cells = {{Role::kParam, Phase::kHold, "RR@device:bf16"}},
                   .most_micro = 1});
  // Gradients add up in shards on the device, and the update runs on the host.
  cases.push_back({.strategy = "zero2",
                   .optim_tier = Tier::kHost,
                   .cells = {{Role::kGrad, Phase::kHold, "SS@device:fp32"},
                             {Role::kGrad, Phase::kUpdate, "SS@host:fp32"}}});
  // Gradients add up inside the node and cross nodes once per step.
  cases.push_back({.strategy = "mics",
                   .cells = {{Role::kGrad, Phase::kHold, "PS@device:fp32"},
                             {Role::kGrad, Phase::kUpdate, "RS@device:fp32"}}});
  return cases;
}

}  // namespace penstock::plans
