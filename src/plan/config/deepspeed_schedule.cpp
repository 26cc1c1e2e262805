#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "penstock/deepspeed_config.h"
#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {
// The formulas are the same as in deepspeed/runtime/lr_schedules.py.

constexpr double kNeeded = std::numeric_limits<double>::quiet_NaN();
constexpr double kMissing = -1.0;  // the default follows from another parameter

using Params = std::map<std::string, double>;

// Returns how much of the warm-up is done, from 0 to 1.
double warmup(const Params& params, double iteration, double steps) {
  if (params.at("warmup_type") == 1.0) return iteration / steps;
  return std::log(iteration + 1.0) / std::log(steps);
}

double warmup_lr(const DeepSpeedSchedule& schedule, double iteration) {
  const Params& params = schedule.params;
  const double low = params.at("warmup_min_lr"), high = params.at("warmup_max_lr");
  if (iteration < 0) return low;
  const double steps = std::max(2.0, params.at("warmup_num_steps"));
  double share = 1.0;
  if (iteration < steps) {
    share = warmup(params, iteration, steps);
  } else if (schedule.type == "WarmupDecayLR") {
    const double total = params.at("total_num_steps");
    share = std::max(0.0, (total - iteration) / std::max(1.0, total - steps));
  }
  return low + (high - low) * share;
}

double warmup_cosine(const Params& params, double iteration) {
  if (iteration < 0) return 0.0;
  const double steps = std::max(2.0, params.at("warmup_num_steps"));
  if (iteration < steps) {
    const double low = params.at("warmup_min_ratio");
    return low + (1.0 - low) * warmup(params, iteration, steps);
  }
  const double left = std::max(1.0, params.at("total_num_steps") - steps);
  const double done = std::min(1.0, (iteration - steps + 1.0) / left);
  const double low = params.at("cos_min_ratio");
  return std::max(0.0, low + (1.0 - low) * (1.0 + std::cos(std::numbers::pi * done)) / 2.0);
}

double range_test(const Params& params, double iteration) {
  double interval = (iteration + 1.0) / params.at("lr_range_test_step_size");
  if (params.at("lr_range_test_staircase") != 0.0) interval = std::floor(interval);
  const double low = params.at("lr_range_test_min_lr");
  return iteration < 0 ? low : low * (1.0 + params.at("lr_range_test_step_rate") * interval);
}

// The two halves of OneCycle. height() returns the height of the cycle at an iteration.
struct Cycle {
  double first, second, first_stairs, second_stairs;

  explicit Cycle(const Params& params)
      : first(params.at("cycle_first_step_size")),
        second(params.at("cycle_second_step_size")),
        first_stairs(params.at("cycle_first_stair_count")),
        second_stairs(params.at("cycle_second_stair_count")) {
    if (second == kMissing) second = first;
    if (second_stairs == kMissing) second_stairs = first_stairs;
  }

  double total() const { return first + second; }

  // Returns a value that rises from 0 to 1 in the first half of the cycle and falls to 0 in the
  // second. The position is computed exactly as in DeepSpeed, since rounding decides in which half
  // a boundary lies.
  double height(double iteration) const {
    const double next = iteration + 1.0, ratio = first / total();
    const double x = 1.0 + next / total() - std::floor(1.0 + next / total());
    const bool rises = x <= ratio;
    const double stairs = rises ? first_stairs : second_stairs;
    if (stairs <= 0) return rises ? x / ratio : (x - 1.0) / (ratio - 1.0);
    const double at = std::fmod(next, total());
    const double stair = at <= first ? at * stairs / first : (total() - at) * stairs / second;
    return std::floor(stair) / stairs;
  }
};

bool decays(const Params& params, const char* rate) {
  return std::abs(params.at("decay_step_size")) > 1e-9 && std::abs(params.at(rate)) > 1e-9;
}

double one_cycle_lr(const Params& params, double iteration) {
  const Cycle cycle(params);
  const double low = params.at("cycle_min_lr"), high = params.at("cycle_max_lr");
  if (iteration < 0) return low;
  if (iteration < cycle.total()) return low + (high - low) * cycle.height(iteration);
  if (!decays(params, "decay_lr_rate")) return low;
  const double interval = (iteration - cycle.total() + 1.0) / params.at("decay_step_size");
  return low / (1.0 + params.at("decay_lr_rate") * interval);
}

[[noreturn]] void fail_schedule(const std::string& message) {
  throw ConfigError("[plan::DeepSpeedSchedule] " + message);
}

void check_steps(const Params& params, const char* name, double least) {
  const auto found = params.find(name);
  if (found == params.end()) return;
  const double value = found->second;
  if (value != std::floor(value) || value < least)
    fail_schedule(
        concat("\"", name, "\" is ", value, "; allowed: a whole number, at least ", least));
}

}  // namespace

// NaN marks a required parameter; make() refuses it.
const std::map<std::string, Params>& DeepSpeedSchedule::all() {
  static const std::map<std::string, Params> kAll = {{"LRRangeTest",
                                                      {{"lr_range_test_min_lr", 1e-3},
                                                       {"lr_range_test_step_size", 2000},
                                                       {"lr_range_test_step_rate", 1.0},
                                                       {"lr_range_test_staircase", 0}}},
                                                     {"OneCycle",
                                                      {{"cycle_min_lr", kNeeded},
                                                       {"cycle_max_lr", kNeeded},
                                                       {"decay_lr_rate", 0},
                                                       {"cycle_first_step_size", 2000},
                                                       {"cycle_second_step_size", kMissing},
                                                       {"cycle_first_stair_count", 0},
                                                       {"cycle_second_stair_count", kMissing},
                                                       {"decay_step_size", 0},
                                                       {"cycle_momentum", 1},
                                                       {"cycle_min_mom", 0.8},
                                                       {"cycle_max_mom", 0.9},
                                                       {"decay_mom_rate", 0}}},
                                                     {"WarmupLR",
                                                      {{"warmup_min_lr", 0},
                                                       {"warmup_max_lr", kNeeded},
                                                       {"warmup_num_steps", 1000},
                                                       {"warmup_type", 0}}},
                                                     {"WarmupDecayLR",
                                                      {{"total_num_steps", kNeeded},
                                                       {"warmup_min_lr", 0},
                                                       {"warmup_max_lr", 1e-3},
                                                       {"warmup_num_steps", 1000},
                                                       {"warmup_type", 0}}},
                                                     {"WarmupCosineLR",
                                                      {{"total_num_steps", kNeeded},
                                                       {"warmup_min_ratio", 0},
                                                       {"warmup_num_steps", 1000},
                                                       {"cos_min_ratio", 1e-4},
                                                       {"warmup_type", 0},
                                                       {"base_lr", kNeeded}}}};
  return kAll;
}

DeepSpeedSchedule DeepSpeedSchedule::make(const std::string& type, const Params& params) {
  const auto kind = all().find(type);
  if (kind == all().end()) {
    std::vector<std::string> names;
    for (const auto& [name, defaults] : all()) names.push_back(name);
    fail_schedule(concat("there is no schedule \"", type, "\"; allowed: ", join(names, ", ")));
  }
  DeepSpeedSchedule made{type, kind->second};
  for (const auto& [name, value] : params) {
    if (!made.params.contains(name)) {
      std::vector<std::string> names;
      for (const auto& [known, otherwise] : made.params) names.push_back(known);
      fail_schedule(concat(type, " has no parameter \"", name, "\"; it has ", join(names, ", ")));
    }
    made.params[name] = value;
  }
  for (const auto& [name, value] : made.params) {
    if (std::isnan(value)) fail_schedule(concat(type, " needs \"", name, "\""));
  }
  check_steps(made.params, "warmup_num_steps", 1);
  check_steps(made.params, "lr_range_test_step_size", 1);
  check_steps(made.params, "cycle_first_step_size", 1);
  check_steps(made.params, "cycle_second_step_size", kMissing);
  return made;
}

double DeepSpeedSchedule::lr(int64_t iteration) const {
  const auto at = static_cast<double>(iteration);
  if (type == "OneCycle") return one_cycle_lr(params, at);
  if (type == "LRRangeTest") return range_test(params, at);
  if (type == "WarmupCosineLR") return params.at("base_lr") * warmup_cosine(params, at);
  return warmup_lr(*this, at);
}

double DeepSpeedSchedule::momentum(int64_t iteration) const {
  const Cycle cycle(params);
  const auto at = static_cast<double>(iteration);
  const double low = params.at("cycle_min_mom"), high = params.at("cycle_max_mom");
  if (iteration < 0) return low;
  if (at < cycle.total()) return high - (high - low) * cycle.height(at);
  if (!decays(params, "decay_mom_rate")) return high;
  const double interval = (at - cycle.total() + 1.0) / params.at("decay_step_size");
  return high * (1.0 + params.at("decay_mom_rate") * interval);
}

}  // namespace penstock
