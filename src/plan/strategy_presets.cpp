// The strategies as tables: preset() and preset_names() of table.h.
#include <algorithm>
#include <array>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/table.h"

namespace penstock {

namespace {

// A preset: layouts over (node, local). A parameter layout may name its tier ("SS@host"); otherwise
// the tier comes from the options.
struct Preset {
  const char* name;
  const char *param_rest, *param_hold, *grad_hold, *grad_update, *optim;
};
constexpr std::array<Preset, 7> kPresets = {{
    {"ddp", "RR", "RR", "PP", "RR", "RR"},
    {"zero1", "RR", "RR", "PP", "SS", "SS"},
    {"zero2", "RR", "RR", "SS", "SS", "SS"},
    {"zero3", "SS", "SS", "SS", "SS", "SS"},
    {"hpz", "SS", "RS", "SS", "SS", "SS"},
    {"hpz_host", "SS@host", "RS@device", "SS", "SS", "SS"},
    {"mics", "RS", "RS", "RS", "RS", "RS"},
}};

Placement place(const char* letters, Dtype dtype, Tier tier = Tier::kDevice) {
  return Placement::parse(concat(letters, "@", tier_name(tier), ":", dtype_name(dtype)));
}

// `text` may name the tier.
Placement place_on(Tier tier_if_sharded, const std::string& text, Dtype dtype) {
  Placement cell = place(text.substr(0, kDataAxes.size()).c_str(), dtype);
  const size_t at = text.find('@');
  if (at != std::string::npos) {
    cell.tier = parse_tier(text.substr(at + 1));
  } else if (cell.sharded()) {
    cell.tier = tier_if_sharded;
  }
  return cell;
}

}  // namespace

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
  const bool fixed = std::string_view(cells.param_rest).find('@') != std::string_view::npos;
  if (options.param_tier != Tier::kDevice && (fixed || !rest.sharded()))
    throw ConfigError(concat("[plan::preset] offload.params '", tier_name(options.param_tier),
                             "' needs parameters that are sharded on the device between uses, but "
                             "strategy '",
                             name, "' does not shard them there: allowed with zero3, hpz, mics"));
  const bool shards_grads = place(cells.grad_hold, precision).sharded();
  if (options.grad_tier && !shards_grads)
    throw ConfigError(concat("[plan::preset] offload.gradients '", tier_name(*options.grad_tier),
                             "' needs sharded gradients, but strategy '", name,
                             "' does not shard them: allowed with zero2, zero3, hpz, hpz_host, "
                             "mics"));
  const bool offloads = options.optim_tier != Tier::kDevice;
  const Tier update_tier = offloads ? Tier::kHost : Tier::kDevice;
  const Dtype sum = options.accumulate ? Dtype::kFp32 : precision;

  Table table;
  table.set(Role::kParam, Phase::kRest, rest);
  table.set(Role::kParam, Phase::kForward, place("RR", precision));
  table.set(Role::kParam, Phase::kHold, place_on(options.param_tier, cells.param_hold, precision));
  table.set(Role::kParam, Phase::kBackward, place("RR", precision));
  table.set(Role::kGrad, Phase::kBackward, place("PP", precision));
  table.set(Role::kGrad, Phase::kHold,
            place_on(options.grad_tier.value_or(update_tier), cells.grad_hold,
                     options.grad_tier == Tier::kHost ? precision : sum));
  table.set(Role::kGrad, Phase::kUpdate, place(cells.grad_update, sum, update_tier));
  table.set(Role::kOptim, Phase::kRest, place(cells.optim, options.moments, options.optim_tier));
  table.set(Role::kOptim, Phase::kUpdate, place(cells.optim, options.moments, update_tier));
  // Every rank has the activations of its own samples.
  table.set(Role::kAct, Phase::kForward, place("SS", precision));
  table.set(Role::kAct, Phase::kHold, place("SS", precision, options.act_tier));
  table.set(Role::kAct, Phase::kBackward, place("SS", precision));
  return table;
}

}  // namespace penstock
