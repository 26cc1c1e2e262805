#include "src/plan/cost/strategy_choice.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <sstream>
#include <tuple>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/check.h"
#include "src/plan/cost/step_time.h"
#include "src/plan/strategy.h"

namespace penstock {

std::string Alternative::text() const {
  return concat("strategy \"", strategy, "\", offload.optimizer \"", optimizer,
                "\", offload.params \"", params, "\", offload.gradients \"", gradients, "\"");
}

std::string Room::text() const {
  std::vector<std::string> parts;
  const std::pair<const char*, int64_t> limits[] = {
      {"device", device}, {"host", host}, {"device and host together", memory}, {"disk", disk}};
  for (const auto& [name, bytes] : limits) {
    if (bytes == kNoLimit) continue;
    parts.push_back(concat(name, " ", format_bytes(static_cast<double>(bytes))));
  }
  return parts.empty() ? "no limits" : join(parts, ", ");
}

namespace {

using Limits = std::array<std::pair<std::string, std::pair<int64_t, int64_t>>, 4>;

// Resource -> (needed, allowed).
Limits limits(const Alternative& one, const Room& room) {
  return {{{"device", {one.device, room.device}},
           {"host", {one.host, room.host}},
           {"memory", {one.memory, room.memory}},
           {"disk", {one.disk, room.disk}}}};
}

int64_t excess_bytes(const Alternative& one, const Room& room) {
  int64_t sum = 0;
  for (const auto& [name, sizes] : limits(one, room)) {
    sum += std::max<int64_t>(0, sizes.first - sizes.second);
  }
  return sum;
}

// The prediction does not include some memory (for reads outside modules, or if the order differs
// from the assumed one). So a config is tight if less than a tenth of a limit is left.
bool is_tight(const Alternative& one, const Room& room) {
  const Limits all = limits(one, room);
  return std::any_of(all.begin(), all.end(), [](const auto& limit) {
    const auto& [needed, allowed] = limit.second;
    return needed > allowed - allowed / 10;
  });
}

std::string excess(const Alternative& one, const Room& room) {
  std::vector<std::string> parts;
  for (const auto& [name, sizes] : limits(one, room)) {
    const auto& [needed, allowed] = sizes;
    if (needed <= allowed) continue;
    parts.push_back(
        concat(name, " ", format_bytes(static_cast<double>(needed - allowed)), " over"));
  }
  return join(parts, ", ");
}

Work work_of(const PlanQuestion& asked, const ModelDesc& model, const Table& table,
             const Mesh& mesh) {
  Work work;
  work.tokens = asked.tokens;
  const Placement& update = table.at(Role::kOptim, Phase::kUpdate);
  work.updates_on_host = update.tier != Tier::kDevice;
  for (const UnitDesc& unit : model.units) {
    for (const FlatDesc& flat : unit.flats) {
      work.params += flat.numel;
      if (unit.recomputed) work.again_params += flat.numel;
      if (!flat.trainable) continue;
      work.trained_params += flat.numel;
      work.updated_params += flat.numel / num_shards(update, flat.placement.mesh(mesh));
    }
  }
  return work;
}

// Simulates one alternative: bytes from the simulator's ledger, seconds from step_time().
Alternative simulated(const Question& question, const Config& config, const ModelDesc& model) {
  const PlanQuestion& asked = question.asked;
  const Mesh mesh = mesh_of(config);
  const Ledger ledger = question.many ? predict_window(config, model, question.external_optimizer)
                                      : predict(config, model, question.external_optimizer);
  const Work work = work_of(asked, model, table_of(config, model).on(mesh), mesh);
  const StepTime time = step_time(work, ledger, asked.machine);
  Alternative one{config.strategy, config.offload.optimizer, config.offload.params,
                  config.offload.gradients};
  one.device = ledger.tier[static_cast<size_t>(Tier::kDevice)].total;
  one.host = ledger.tier[static_cast<size_t>(Tier::kHost)].total;
  one.disk = ledger.tier[static_cast<size_t>(Tier::kDisk)].total;
  one.memory = ledger.in_memory;
  one.seconds = time.total();
  one.forward = time.forward;
  one.backward = time.backward;
  one.again = time.again;
  one.layers = time.layers;
  one.longest = time.longest;
  one.over = excess(one, asked.room);
  one.fits = one.over.empty();
  one.tight = one.fits && is_tight(one, asked.room);
  return one;
}

const std::vector<std::string> kTiers = {"none", "host", "disk"};

std::vector<std::string> tiers(const std::string& configured) {
  return configured == "auto" ? kTiers : std::vector<std::string>{configured};
}

// Returns whether sums over several backwards are rounded. This happens only to gradients on the
// host.
bool rounds(const Alternative& one, const Config& config, const ModelDesc& model) {
  return one.gradients == "host" && config.batch.accumulate > 1 &&
         precision_of(model) != Dtype::kFp32;
}

// Returns the tiers of gradients to try; all other tiers of the config are set. A tier that does
// not apply to the config's strategy is left out, but the configured tier is always tried.
std::vector<std::string> gradient_tiers(const Question& question, const Config& config) {
  if (question.gradients.empty()) return {config.offload.gradients};
  std::vector<std::string> applied;
  for (const std::string& tier : question.gradients) {
    Config one = config;
    one.offload.gradients = tier;
    if (adapted(one, config.strategy, config.offload.optimizer).offload.gradients == tier) {
      applied.push_back(tier);
    }
  }
  return applied;
}

// Returns why the config cannot run; empty if it can.
std::string refusal_of(const Config& config, const ModelDesc& model, bool external_optimizer) {
  if (external_optimizer && config.offload.optimizer == "disk") {
    return "[plan::choice] offload.optimizer \"disk\" needs one of the engine's optimizers, "
           "because an optimizer of your own keeps its state in memory. Set offload.optimizer to "
           "\"host\"";
  }
  try {
    const std::string codec = codec_refusal(config, model);
    if (!codec.empty()) return codec;
    const OptimizerType optimizer = config.optimizer.value_or(OptimizerConfig{}).type;
    check_outer_steps(config, table_of(config, model), external_optimizer);
    check(table_of(config, model), model, mesh_of(config),
          {external_optimizer, config.offload.late_update, optimizer, config.comm.exact_first > 0});
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

Config with(const Config& config, const Alternative& chosen) {
  Config one = adapted(config, chosen.strategy, chosen.optimizer);
  one.offload.params = chosen.params;
  one.offload.gradients = chosen.gradients;
  return one;
}

void open_all(Question& question) {
  question.asked.config.offload.optimizer = question.asked.config.offload.params = "auto";
  question.gradients = kTiers;
}

// Tries every combination of open tiers. Ranks with the same config, model and room get the same
// order, since the sort is stable and uses no measured value.
std::vector<Alternative> alternatives(const Question& question, const ModelDesc& model) {
  const Config& config = question.asked.config;
  std::vector<Alternative> all;
  for (const std::string& strategy : question.strategies) {
    for (const std::string& optimizer : tiers(config.offload.optimizer)) {
      for (const std::string& params : tiers(config.offload.params)) {
        const bool tried = config.offload.params == "auto";
        if (tried && params != "none" && !can_rest_away(strategy)) continue;
        Config one = adapted(config, strategy, optimizer);
        one.offload.params = params;
        for (const std::string& gradients : gradient_tiers(question, one)) {
          one.offload.gradients = gradients;
          if (!refusal_of(one, model, question.external_optimizer).empty()) continue;
          all.push_back(simulated(question, one, model));
        }
      }
    }
  }
  const auto rank = [&](const Alternative& one) {
    const bool worse = !question.gradients.empty() && rounds(one, config, model);
    return std::tuple(excess_bytes(one, question.asked.room), worse, one.tight, one.seconds,
                      one.disk, one.host, one.device);
  };
  std::stable_sort(all.begin(), all.end(),
                   [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  return all;
}

std::string seconds_text(double seconds) {
  std::ostringstream text;
  text << std::setprecision(3) << seconds;
  return text.str();
}

std::string choice_text(const std::vector<Alternative>& alternatives) {
  const bool moves = std::any_of(alternatives.begin(), alternatives.end(),
                                 [](const auto& one) { return one.gradients != "none"; });
  std::vector<std::vector<std::string>> rows = {
      {"strategy", "optimizer", "params", "device", "host", "disk", "s/step", "fits", "why"}};
  if (moves) rows.front().insert(rows.front().begin() + 3, "gradients");
  for (const Alternative& one : alternatives) {
    const bool first = &one == &alternatives.front();
    const auto bytes = [](int64_t count) {
      return count == 0 ? "-" : format_bytes(static_cast<double>(count));
    };
    const std::string waits = one.longest.empty() ? "" : "longest: " + one.longest;
    std::vector<std::string> why;
    if (!one.fits) why.push_back(one.over);
    if (one.fits && first) why.emplace_back("fastest that fits");
    if (one.tight) why.emplace_back("less than a tenth to spare");
    if (one.fits && !waits.empty()) why.push_back(waits);
    rows.push_back({one.strategy, one.optimizer, one.params, bytes(one.device), bytes(one.host),
                    bytes(one.disk), seconds_text(one.seconds),
                    !one.fits ? "no" : (one.tight ? "tight" : "yes"), join(why, "; ")});
    if (moves) rows.back().insert(rows.back().begin() + 3, one.gradients);
  }
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size() + 2);
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i)
      line += row[i] + std::string(widths[i] - row[i].size(), ' ');
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

// Every choice for the open tiers was refused, so trying "none" for them shows why the fixed tiers
// are refused.
std::string refusal(const Question& question, const ModelDesc& model) {
  Config config = question.asked.config;
  for (std::string* tier : {&config.offload.optimizer, &config.offload.params}) {
    if (*tier == "auto") *tier = "none";
  }
  return refusal_of(config, model, question.external_optimizer);
}

void refuse(const Alternative& chosen, const std::vector<Alternative>& others, const Room& room) {
  std::vector<std::string> needs;
  for (const auto& [name, sizes] : limits(chosen, room)) {
    const auto& [needed, allowed] = sizes;
    if (needed <= allowed) continue;
    needs.push_back(concat(format_bytes(static_cast<double>(needed)), " of ", name, ", but ",
                           format_bytes(static_cast<double>(allowed)), " is allowed"));
  }
  const auto fits = std::find_if(others.begin(), others.end(),
                                 [](const Alternative& other) { return other.fits; });
  const std::string instead =
      fits != others.end()
          ? "this fits: " + fits->text()
          : "no strategy and no offload fits. Use more ranks, raise memory.device_bytes or "
            "memory.host_bytes (if unset, the limit is the free memory that was found), or set "
            "keys that are not chosen automatically (a smaller offload.window_bytes or "
            "prefetch_bytes, tiling, units)";
  throw ConfigError(concat("[plan::refuse] ", chosen.text(), " needs ", join(needs, " and "),
                           " on each rank; ", instead));
}

// `now` is the combination in use. An alternative helps only if it needs less of the resource that
// ran out.
std::string advice(const Question& question, const ModelDesc& model, const OffloadConfig& now,
                   int64_t Alternative::* bytes) {
  const std::vector<Alternative> all = alternatives(question, model);
  const auto current = std::find_if(all.begin(), all.end(), [&](const Alternative& one) {
    return one.optimizer == now.optimizer && one.params == now.params &&
           one.gradients == now.gradients;
  });
  const auto less = std::find_if(all.begin(), all.end(), [&](const Alternative& one) {
    return one.fits && current != all.end() && one.*bytes < (*current).*bytes;
  });
  const std::string beyond =
      " (the prediction does not include gathered(), weights that are read outside their module, "
      "or units that do not run in the order in which the model lists them)";
  if (less == all.end()) {
    return concat("no offload that fits needs less: use more ranks or allow more", beyond);
  }
  return concat(less->text(),
                " needs less of it: ", format_bytes(static_cast<double>((*less).*bytes)),
                " predicted, not ", format_bytes(static_cast<double>((*current).*bytes)), beyond);
}

}  // namespace penstock
