#include "src/plan/table.h"

#include <algorithm>
#include <array>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

// The cells that a role has; the others mean nothing.
const std::vector<std::pair<Role, std::vector<Phase>>>& used_cells() {
  static const std::vector<std::pair<Role, std::vector<Phase>>> kUsed = {
      {Role::kParam,
       {Phase::kRest, Phase::kForward, Phase::kHold, Phase::kBackward, Phase::kUpdate}},
      {Role::kGrad, {Phase::kBackward, Phase::kHold, Phase::kUpdate}},
      {Role::kOptim, {Phase::kRest, Phase::kUpdate}},
      {Role::kAct, {Phase::kForward, Phase::kHold, Phase::kBackward}},
  };
  return kUsed;
}

// A preset: layouts over (node, local).
struct Preset {
  const char* name;
  const char *param_rest, *param_hold, *grad_hold, *grad_update, *optim;
};
constexpr std::array<Preset, 6> kPresets = {{
    {"ddp", "RR", "RR", "PP", "RR", "RR"},
    {"zero1", "RR", "RR", "PP", "SS", "SS"},
    {"zero2", "RR", "RR", "SS", "SS", "SS"},
    {"zero3", "SS", "SS", "SS", "SS", "SS"},
    {"hpz", "SS", "RS", "SS", "SS", "SS"},
    {"mics", "RS", "RS", "RS", "RS", "RS"},
}};

Placement place(const char* letters, Dtype dtype, Tier tier = Tier::kDevice) {
  return Placement::parse(concat(letters, "@", tier_name(tier), ":", dtype_name(dtype)));
}

Placement place_on(Tier tier_if_sharded, const char* letters, Dtype dtype) {
  Placement cell = place(letters, dtype);
  if (cell.sharded()) cell.tier = tier_if_sharded;
  return cell;
}

}  // namespace

const char* role_name(Role role) {
  static constexpr std::array<const char*, kNumRoles> kNames = {"param", "grad", "optim", "act"};
  return kNames[static_cast<size_t>(role)];
}

const char* phase_name(Phase phase) {
  static constexpr std::array<const char*, kNumPhases> kNames = {"rest", "forward", "hold",
                                                                 "backward", "update"};
  return kNames[static_cast<size_t>(phase)];
}

const Placement& Table::at(Role role, Phase phase) const {
  return cells_[static_cast<size_t>(role)][static_cast<size_t>(phase)];
}

void Table::set(Role role, Phase phase, const Placement& place) {
  cells_[static_cast<size_t>(role)][static_cast<size_t>(phase)] = place;
}

Table Table::on(const Mesh& mesh) const {
  Table seen = *this;
  for (auto& row : seen.cells_)
    for (Placement& cell : row) cell = normalize(cell, mesh);
  return seen;
}

Dtype Table::dtype_in(const Placement& cell, Dtype own) const {
  return cell.dtype == at(Role::kParam, Phase::kForward).dtype ? own : cell.dtype;
}

bool Table::has_master(Dtype dtype) const {
  const Tier rest = at(Role::kParam, Phase::kRest).tier;
  return dtype != Dtype::kFp32 || rest != at(Role::kOptim, Phase::kRest).tier ||
         rest != at(Role::kOptim, Phase::kUpdate).tier;
}

Placement Table::master() const {
  Placement place = at(Role::kOptim, Phase::kUpdate);
  place.dtype = Dtype::kFp32;
  return place;
}

bool Table::moves_params() const {
  return !(at(Role::kParam, Phase::kRest) == at(Role::kParam, Phase::kForward));
}

bool Table::moves_activations() const {
  return !(at(Role::kAct, Phase::kHold) == at(Role::kAct, Phase::kForward));
}

bool Table::holds_grad_in_place() const {
  const Placement& made = at(Role::kGrad, Phase::kBackward);
  const Placement& held = at(Role::kGrad, Phase::kHold);
  return made.layout == held.layout && made.tier == held.tier;
}

const Placement& Table::grad_after_backward() const {
  return at(Role::kGrad, holds_grad_in_place() ? Phase::kHold : Phase::kBackward);
}

std::string Table::text() const {
  std::string out;
  for (const auto& [role, phases] : used_cells()) {
    out += role_name(role);
    for (const Phase phase : phases)
      out += concat(" ", phase_name(phase), "=", at(role, phase).text());
    out += "\n";
  }
  return out;
}

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> names;
    for (const Preset& preset : kPresets) names.emplace_back(preset.name);
    return names;
  }();
  return kNames;
}

Table preset(const std::string& name, const TableOptions& options) {
  const auto found = std::find_if(kPresets.begin(), kPresets.end(),
                                  [&](const Preset& preset) { return name == preset.name; });
  if (found == kPresets.end()) {
    const std::string near = nearest(name, preset_names());
    throw ConfigError(concat("[plan::preset] strategy '", name, "' is unknown: allowed are ",
                             join(preset_names(), ", "),
                             near.empty() ? "" : concat("; did you mean '", near, "'?")));
  }
  const Preset& cells = *found;
  const Dtype precision = options.precision;
  const Placement rest = place_on(options.param_tier, cells.param_rest, precision);
  if (options.param_tier != Tier::kDevice && !rest.sharded())
    throw ConfigError(concat("[plan::preset] offload.params '", tier_name(options.param_tier),
                             "' needs parameters that rest sharded, which strategy '", name,
                             "' has not: allowed with zero3, hpz, mics"));
  const Placement held = place_on(Tier::kDisk, cells.grad_hold, precision);
  if (options.grads_on_disk && held.tier != Tier::kDisk)
    throw ConfigError(
        concat("[plan::preset] offload.gradients 'disk' needs gradients that are "
               "held sharded, which strategy '",
               name, "' has not: allowed with zero2, zero3, hpz, mics"));
  const bool offloads = options.optim_tier != Tier::kDevice;
  const Tier update_tier = offloads ? Tier::kHost : Tier::kDevice;
  const Dtype sum = options.accumulate ? Dtype::kFp32 : precision;

  Table table;
  table.set(Role::kParam, Phase::kRest, rest);
  table.set(Role::kParam, Phase::kForward, place("RR", precision));
  table.set(Role::kParam, Phase::kHold, place_on(options.param_tier, cells.param_hold, precision));
  table.set(Role::kParam, Phase::kBackward, place("RR", precision));
  table.set(Role::kParam, Phase::kUpdate, rest);
  table.set(Role::kGrad, Phase::kBackward, place("PP", precision));
  table.set(Role::kGrad, Phase::kHold,
            place_on(options.grads_on_disk ? Tier::kDisk : update_tier, cells.grad_hold, sum));
  table.set(Role::kGrad, Phase::kUpdate, place(cells.grad_update, sum, update_tier));
  table.set(Role::kOptim, Phase::kRest, place(cells.optim, options.moments, options.optim_tier));
  table.set(Role::kOptim, Phase::kUpdate, place(cells.optim, options.moments, update_tier));
  // Every rank has those of its own samples.
  table.set(Role::kAct, Phase::kForward, place("SS", precision));
  table.set(Role::kAct, Phase::kHold, place("SS", precision, options.act_tier));
  table.set(Role::kAct, Phase::kBackward, place("SS", precision));
  return table;
}

}  // namespace penstock
