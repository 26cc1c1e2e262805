#include "penstock/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>
#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "penstock/plan.h"
#include "src/base/text.h"
#include "src/place/placement.h"
#include "src/plan/config/section.h"
#include "src/plan/pipeline_schedule.h"
#include "src/plan/table.h"

namespace penstock {

namespace {

using namespace config_text;

// Refuses duplicate keys, because the JSON library would silently keep one of them.
Json parse_json(const std::string& text) {
  std::vector<std::set<std::string>> open;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(value.get<std::string>()).second)
      fail(concat("key ", value.dump(), " is given twice"));
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    fail(concat("the config is not valid JSON: ", error.what()));
  }
}

std::string parse_placement(const std::string& path, const std::string& text) {
  Placement place;
  try {
    place = Placement::parse(text);
  } catch (const ConfigError& error) {
    fail(concat("\"", path, "\" is \"", text, "\": ", error.what()));
  }
  return place.text();
}

std::string parse_wires(const std::string& path, const std::string& name, const std::string& text) {
  TableWires wires;
  try {
    wires.set(name, text);
  } catch (const ConfigError& error) {
    fail(concat("\"", path, "\" is \"", text, "\": ", error.what()));
  }
  return wires.text(name);
}

// Every cell must be one that Table has; the planner reads the cells by these names (table_of()).
void parse_table(const Json& value, Config* config) {
  static const std::map<std::string, std::vector<std::string>> kCells = {
      {"param", {"rest", "forward", "hold", "backward", "update"}},
      {"grad", {"backward", "hold", "update"}},
      {"optim", {"rest", "update"}},
      {"residual", {"rest"}},
      {kWireRow, TableWires::names()}};
  if (value.is_object() && value.contains("act"))
    fail_unsupported("table.act", value["act"],
                     "activations are placed by the key \"offload.activations\"");
  if (value.is_object() && value.contains("cache"))
    fail_unsupported("table.cache", value["cache"],
                     "cached tokens are placed by the keys \"offload.cache\" and "
                     "\"quantize.cache\"");
  const ConfigSection roles(value, "table", {"param", "grad", "optim", "residual", kWireRow});
  for (const auto& [role, phases] : kCells) {
    const Json* row = roles.find(role);
    if (row == nullptr) continue;
    const ConfigSection cells(*row, "table." + role, phases);
    for (const std::string& phase : phases) {
      std::string text;
      cells.read_text(phase, &text);
      if (!cells.has(phase)) continue;
      config->table[role][phase] = role == kWireRow ? parse_wires(cells.path(phase), phase, text)
                                                    : parse_placement(cells.path(phase), text);
    }
  }
}

void parse_mesh(const Json& value, MeshConfig* mesh) {
  const ConfigSection section(value, "mesh",
                              {"data", "tensor", "pipeline", "sequence", "expert", "node"});
  const std::string whole = "a whole number >= 1";
  section.read_int("data", &mesh->data, 1, whole);
  section.read_int("node", &mesh->node, 1, whole);
  section.read_int("tensor", &mesh->tensor, 1, whole);
  section.read_int("sequence", &mesh->sequence, 1, whole);
  section.read_int("pipeline", &mesh->pipeline, 1, whole);
  section.read_int("expert", &mesh->expert, 1, whole);
}

void parse_names(const ConfigSection& section, const std::string& key, const std::string& allowed,
                 std::vector<std::string>* out) {
  const Json* names = section.find(key);
  if (names == nullptr) return;
  if (!names->is_array()) fail_value(section.path(key), *names, allowed);
  for (const Json& name : *names) {
    if (!name.is_string() || name.get<std::string>().empty())
      fail_value(section.path(key), *names, allowed);
    out->push_back(name.get<std::string>());
  }
}

// Styles are checked later, when the modules are known (src/parallel/tensor_rules.h).
void parse_parallel(const Json& value, Config* config) {
  const ConfigSection section(value, "parallel",
                              {"rules", "stages", "schedule", "virtual_stages", "cut_logits",
                               "norms", "sequence", "verify"});
  ParallelConfig& parallel = config->parallel;
  parse_names(section, "stages", "a list of module names, such as [\"transformer.h.6\"]",
              &parallel.stages);
  parallel.schedule = section.choice("schedule", parallel.schedule, schedule_names());
  section.read_int("virtual_stages", &parallel.virtual_stages, 1, "a whole number >= 1");
  section.read("cut_logits", &parallel.cut_logits);
  parallel.norms = section.choice("norms", parallel.norms, {"whole", "tokens"});
  parallel.sequence = section.choice("sequence", parallel.sequence, {"heads", "ring", "both"});
  parallel.verify = section.choice("verify", parallel.verify, {"own", "all", "off"});
  const bool has_one = parallel.schedule == "1f1b" || parallel.schedule == "zero_bubble";
  if (parallel.virtual_stages > 1 && has_one)
    fail(concat(
        "\"parallel.virtual_stages\" above 1 needs \"parallel.schedule\": \"interleaved\" or "
        "\"gpipe\"; \"",
        parallel.schedule, "\" has one stage on each rank"));
  const Json* rules = section.find("rules");
  if (rules == nullptr) return;
  if (!rules->is_object()) fail_value("parallel.rules", *rules, "an object {name pattern: style}");
  for (const auto& [pattern, style] : rules->items()) {
    if (pattern.empty()) fail("\"parallel.rules\" has an empty name pattern");
    if (!style.is_string()) fail_value("parallel.rules." + pattern, style, "a style as a string");
    parallel.rules.emplace_back(pattern, style.get<std::string>());
  }
}

std::string parse_compute_dtype(const std::string& path, const Json& value) {
  return ConfigSection::choice_of(path, value, {"fp32", "bf16", "fp16"});
}

void parse_dtypes(const Json& value, Config* config) {
  if (!value.is_object())
    fail_value("dtypes", value, "an object {name pattern: \"fp32\", \"bf16\" or \"fp16\"}");
  for (const auto& [pattern, dtype] : value.items()) {
    if (pattern.empty()) fail("\"dtypes\" has an empty name pattern; \"*\" matches every name");
    config->dtypes.emplace_back(pattern, parse_compute_dtype("dtypes." + pattern, dtype));
  }
}

// Returns whether a cell of the config's table is on the tier. A role or phase of "" matches any.
bool has_cell(const Config& config, const char* role, const char* phase, Tier tier) {
  for (const auto& [name, phases] : config.table) {
    if (name == kWireRow) continue;
    for (const auto& [at, place] : phases) {
      if ((*role == '\0' || name == role) && (*phase == '\0' || at == phase) &&
          Placement::parse(place).tier == tier) {
        return true;
      }
    }
  }
  return false;
}

// "auto" may become any tier later. So if a key needs a tier, it is refused only if no cell has
// this tier and no offload key can become it.
void parse_offload(const Json& value, Config* config) {
  OffloadConfig* const offload = &config->offload;
  if (value == "auto") {
    offload->optimizer = offload->params = "auto";
    return;
  }
  if (value.is_string()) fail_value("offload", value, "\"auto\" or an object {key: value}");
  const ConfigSection section(
      value, "offload",
      {"optimizer", "params", "activations", "gradients", "path", "window_bytes", "keep_bytes",
       "cache", "late_update", "checksums", "timeout_s"});
  for (const auto& [role, tier] :
       {std::pair("optimizer", &offload->optimizer), std::pair("params", &offload->params)}) {
    *tier = section.choice(role, *tier, {"none", "host", "disk", "auto"});
  }
  for (const auto& [role, tier] :
       {std::pair("activations", &offload->activations), std::pair("cache", &offload->cache)}) {
    *tier = section.choice(role, *tier, {"none", "host", "disk"});
  }
  section.read_text("path", &offload->path);
  section.read_bytes("window_bytes", &offload->window_bytes);
  if (offload->optimizer != "disk" && offload->optimizer != "auto" &&
      !has_cell(*config, "optim", "rest", Tier::kDisk) &&
      offload->window_bytes != OffloadConfig{}.window_bytes) {
    section.refuse_without_effect({"window_bytes"}, "unless offload.optimizer is \"disk\"");
  }
  section.read_bytes("keep_bytes", &offload->keep_bytes, 0);
  if (!config->inference && offload->keep_bytes > 0)
    section.refuse_without_effect({"keep_bytes"}, "unless \"inference\" is true");
  section.read("late_update", &offload->late_update);
  offload->gradients = section.choice("gradients", offload->gradients, {"none", "host", "disk"});
  if (offload->optimizer == "none") {
    if (!has_cell(*config, "optim", "update", Tier::kHost))
      section.refuse_without_effect({"late_update"}, "while offload.optimizer is \"none\"");
    if (offload->gradients == "disk")
      fail("\"offload.gradients\" is \"disk\", which needs offload.optimizer \"host\" or \"disk\"");
  }
  section.read("checksums", &offload->checksums);
  section.read("timeout_s", &offload->timeout_s, 1e-3, 1e9, "seconds, a number from 0.001 to 1e9");
  for (const std::string& tier : {offload->optimizer, offload->params, offload->gradients,
                                  offload->activations, offload->cache}) {
    if (tier == "disk" || tier == "auto") return;
  }
  if (has_cell(*config, "", "", Tier::kDisk)) return;
  const std::string nothing = "while nothing is offloaded to disk";
  section.refuse_without_effect({"path", "checksums"}, nothing);
  if (offload->timeout_s != OffloadConfig{}.timeout_s)
    section.refuse_without_effect({"timeout_s"}, nothing);
}

// Runs after parse_offload().
void parse_quantize(const Json& value, Config* config) {
  QuantizeConfig* const quantize = &config->quantize;
  const ConfigSection section(value, "quantize", {"dtype", "params", "cache"});
  quantize->cache = section.choice("cache", quantize->cache, {"none", "int8", "int4"});
  if (config->offload.cache == "none" && quantize->cache != "none")
    section.refuse_without_effect({"cache"}, "while offload.cache is \"none\"");
  quantize->dtype = section.choice("dtype", quantize->dtype, {"none", "int8", "int4"});
  parse_names(section, "params", "a list of name patterns", &quantize->params);
  if (quantize->dtype == "none" && !quantize->params.empty())
    section.refuse_without_effect({"params"}, "while quantize.dtype is \"none\"");
}

// Runs after parse_offload(), whose activations tier needs recomputed units.
void parse_activations(const ConfigSection& top, Config* config) {
  const Json* value = top.find("activations");
  int64_t& checkpoint = config->activations.checkpoint;
  if (value != nullptr) {
    const ConfigSection section(*value, "activations", {"checkpoint"});
    const Json* chosen = section.find("checkpoint");
    if (chosen != nullptr && chosen->is_number()) {
      section.read_int("checkpoint", &checkpoint, 2,
                       "\"none\", \"unit\" or a whole number k >= 2 (every k-th unit)");
    } else if (chosen != nullptr) {
      checkpoint = section.choice("checkpoint", "none", {"none", "unit"}) == "unit" ? 1 : 0;
    }
  }
  if (config->offload.activations != "none" && checkpoint == 0)
    fail(concat("\"offload.activations\" is \"", config->offload.activations,
                "\", which moves the inputs of units that are recomputed in backward. Set "
                "\"activations.checkpoint\" to \"unit\" or a whole number >= 2"));
}

const OptimizerKind& parse_optimizer_kind(const ConfigSection& section) {
  const Json* value = section.find("type");
  if (value == nullptr) return kind_of(OptimizerConfig{}.type);
  const auto* name = value->get_ptr<const std::string*>();
  if (const OptimizerKind* kind = find_optimizer(name == nullptr ? "" : *name)) return *kind;
  std::vector<std::string> names;
  for (const OptimizerKind& kind : optimizer_kinds()) names.push_back(kind.name);
  fail_value(section.path("type"), *value,
             quoted(names) + suggestion("", name == nullptr ? "" : *name, names));
}

void read_key(const ConfigSection& section, const OptimizerKey& key, double* out) {
  section.read(key.name, out, key.least, HUGE_VAL, key.least == 0.0 ? "a number >= 0" : "a number");
}

void read_key(const ConfigSection& section, const OptimizerKey& key, bool* out) {
  section.read(key.name, out);
}

// Reads moments_dtype and layout.
void read_key(const ConfigSection& section, const OptimizerKey& key, std::string* out) {
  const bool layout = key.name == "layout";
  *out = layout ? section.choice(key.name, *out, {"flat", "whole"})
                : section.choice(key.name, *out, {"fp32", "bf16"});
}

// Reads betas.
void read_key(const ConfigSection& section, const OptimizerKey& key, std::array<double, 2>* out) {
  const Json* value = section.find(key.name);
  if (value == nullptr) return;
  const auto is_beta = [](const Json& beta) {
    return beta.is_number() && beta.get<double>() >= 0.0 && beta.get<double>() < 1.0;
  };
  if (!value->is_array() || value->size() != 2 || !is_beta((*value)[0]) || !is_beta((*value)[1]))
    fail_value(section.path(key.name), *value, "[beta1, beta2], two numbers in [0, 1)");
  *out = value->get<std::array<double, 2>>();
}

// Keys that the optimizer does not use are errors, so that no setting is silently ignored.
OptimizerConfig parse_optimizer(const Json& value) {
  std::vector<std::string> names = {"type"};
  for (const OptimizerKey& key : optimizer_keys()) names.push_back(key.name);
  const ConfigSection section(value, "optimizer", names);
  const OptimizerKind& kind = parse_optimizer_kind(section);
  OptimizerConfig optimizer = kind.defaults;
  for (const OptimizerKey& key : optimizer_keys()) {
    if (!kind.takes(key.name)) {
      section.refuse_without_effect({key.name.c_str()},
                                    concat("with optimizer.type \"", kind.name, "\""));
    }
    std::visit([&](auto field) { read_key(section, key, &(optimizer.*field)); }, key.field);
  }
  if (num_moments(optimizer) == 0 && optimizer.moments_dtype != "fp32")
    section.refuse_without_effect({"moments_dtype"}, "while optimizer.momentum is 0");
  if (optimizer.momentum == 0.0 && optimizer.dampening != 0.0)
    section.refuse_without_effect({"dampening"}, "while optimizer.momentum is 0");
  if (optimizer.nesterov && (optimizer.momentum == 0.0 || optimizer.dampening != 0.0))
    fail(
        "\"optimizer.nesterov\" is true, which needs optimizer.momentum > 0 and "
        "optimizer.dampening 0");
  return optimizer;
}

void parse_schedule(const Json& value, ScheduleConfig* schedule) {
  const ConfigSection section(value, "schedule",
                              {"type", "warmup_steps", "total_steps", "min_ratio"});
  schedule->type = section.choice("type", schedule->type, {"none", "constant", "linear", "cosine"});
  const std::string with = concat("with schedule.type \"", schedule->type, "\"");
  const bool decays = schedule->type == "linear" || schedule->type == "cosine";
  if (schedule->type == "none") section.refuse_without_effect({"warmup_steps"}, with);
  if (!decays) section.refuse_without_effect({"total_steps", "min_ratio"}, with);
  section.read_int("warmup_steps", &schedule->warmup_steps, 0, "a whole number >= 0");
  section.read_int("total_steps", &schedule->total_steps, 0, "a whole number >= 0");
  section.read("min_ratio", &schedule->min_ratio, 0.0, 1.0, "a number from 0 to 1");
  if (!decays) return;
  if (schedule->total_steps == 0)
    fail(concat("\"schedule.total_steps\" is missing; schedule.type \"", schedule->type,
                "\" needs the step at which the decay ends, a whole number >= 1"));
  if (schedule->warmup_steps > schedule->total_steps)
    fail(concat("\"schedule.warmup_steps\" is ", schedule->warmup_steps,
                "; allowed: at most schedule.total_steps, which is ", schedule->total_steps));
}

// loss_scale is refused unless some parameters may compute in fp16. Without "precision" the model
// itself may be in fp16.
void parse_loss_scale(const ConfigSection& top, Config* config) {
  const Json* value = top.find("loss_scale");
  if (value == nullptr) return;
  const ConfigSection section(*value, "loss_scale",
                              {"initial", "window", "min", "settle", "hysteresis", "refill"});
  LossScaleConfig& scale = config->loss_scale;
  section.read("initial", &scale.initial, 1.0, 0x1p40, "a number from 1 to 2^40");
  section.read_int("window", &scale.window, 0, "a whole number >= 0 (0 = a fixed scale)");
  section.read("min", &scale.min, 1.0, scale.initial, "a number from 1 to loss_scale.initial");
  section.read_int("settle", &scale.settle, 0, "a whole number >= 0");
  section.read_int("hysteresis", &scale.hysteresis, 1, "a whole number >= 1");
  scale.refill = section.choice("refill", scale.refill, {"growth", "step"});
  const auto is_fp16 = [](const auto& rule) { return rule.second == "fp16"; };
  const bool fp16 = config->precision.value_or("fp16") == "fp16" ||
                    std::any_of(config->dtypes.begin(), config->dtypes.end(), is_fp16);
  if (!fp16 && scale != LossScaleConfig())
    fail(concat("\"loss_scale\" has no effect with \"precision\" \"", *config->precision,
                "\", whose range needs no scaling; leave it out"));
}

void parse_batch(const Json& value, BatchConfig* batch) {
  const ConfigSection section(value, "batch", {"micro", "accumulate", "global", "reduction"});
  const std::string whole = "a whole number >= 1";
  section.read_int("micro", &batch->micro, 1, whole);
  section.read_int("accumulate", &batch->accumulate, 1, whole);
  section.read_int("global", &batch->global, 1, whole);
  batch->reduction = section.choice("reduction", batch->reduction, {"mean", "sum"});
  // 0: resolve() computes it from `micro` and `global`.
  if (batch->micro > 0 && batch->global > 0 && !section.has("accumulate")) batch->accumulate = 0;
}

void parse_units(const Json& value, UnitsConfig* units) {
  const ConfigSection section(value, "units", {"modules", "max_bytes", "layer_bytes"});
  section.read_bytes("max_bytes", &units->max_bytes);
  section.read_bytes("layer_bytes", &units->layer_bytes);
  parse_names(section, "modules", "a list of class names, such as [\"LlamaDecoderLayer\"]",
              &units->modules);
}

void parse_tiling(const Json& value, TilingConfig* tiling) {
  const ConfigSection section(value, "tiling", {"max_bytes", "modules", "loss_tokens", "head"});
  section.read_bytes("max_bytes", &tiling->max_bytes, 0, " (0 = off)");
  parse_names(section, "modules", "a list of module names, such as [\"lm_head\", \"*.mlp.up\"]",
              &tiling->modules);
  section.read_int("loss_tokens", &tiling->loss_tokens, 0,
                   "a whole number of tokens >= 0 (0 = off)");
  section.read_text("head", &tiling->head);
  if (tiling->max_bytes == 0 && !tiling->modules.empty())
    section.refuse_without_effect({"modules"}, "while tiling.max_bytes is 0");
  if (tiling->loss_tokens == 0)
    section.refuse_without_effect({"head"}, "while tiling.loss_tokens is 0");
}

bool has_lossy_wire(const Config& config) {
  const auto row = config.table.find(kWireRow);
  if (row == config.table.end()) return false;
  return std::any_of(row->second.begin(), row->second.end(),
                     [](const auto& wire) { return wire.second != Wire().text(); });
}

// Returns the text of the wire of outer steps. Signs have no place for their error there.
std::string parse_wire(const std::string& path, const std::string& text) {
  Wire wire;
  try {
    wire = Wire::parse(text, Rounding::kStochastic);
  } catch (const ConfigError& error) {
    fail(concat("\"", path, "\" is \"", text, "\": ", error.what()));
  }
  const bool nearest = wire.lossy() && wire.rounding == Rounding::kNearest;
  if (wire.code == Code::kSign || wire.delta || nearest)
    fail_unsupported(path, text, "allowed: \"plain\", \"int8/128\", \"int4/128\"");
  return wire.text(Rounding::kStochastic);
}

// `wires`: whether the table has lossy wires of its own.
void parse_codec(const ConfigSection& section, bool wires, CommConfig* comm) {
  comm->codec =
      section.choice("codec", comm->codec, {"none", "int8", "fp8", "zero++", "1bit", "local"});
  section.read_int("exact_first", &comm->exact_first, 0, "a whole number of steps >= 0");
  section.read_int("exact_every", &comm->exact_every, 0, "a whole number of steps >= 0 (0 = none)");
  if ((comm->codec == "none" || comm->codec == "local") && !wires) {
    section.refuse_without_effect({"exact_first", "exact_every"},
                                  comm->codec == "none"
                                      ? "without comm.codec or a lossy table.wire"
                                      : "with comm.codec \"local\" and plain wires inside nodes");
  }
  if (comm->exact_every == 1) {
    fail(
        "\"comm.exact_every\" is 1, so all steps would be exact. Leave out comm.codec and "
        "table.wire, or set comm.exact_every to 0 (none) or at least 2");
  }
}

// Settings of outer steps need the codec "local". Other codecs may have their default values.
void parse_outer(const ConfigSection& section, CommConfig* comm) {
  section.read_int("outer_every", &comm->outer_every, 1, "a whole number of steps >= 1");
  section.read("outer_lr", &comm->outer_lr, 1e-6, 10.0, "a number from 1e-6 to 10");
  section.read("outer_momentum", &comm->outer_momentum, 0.0, 0.999, "a number from 0 to 0.999");
  section.read_text("outer_wire", &comm->outer_wire);
  comm->outer_wire = parse_wire(section.path("outer_wire"), comm->outer_wire);
  if (comm->codec == "local") return;
  const CommConfig defaults;
  const std::pair<const char*, Json> keys[] = {{"outer_every", defaults.outer_every},
                                               {"outer_lr", defaults.outer_lr},
                                               {"outer_momentum", defaults.outer_momentum},
                                               {"outer_wire", defaults.outer_wire}};
  for (const auto& [key, value] : keys) {
    const Json* given = section.find(key);
    if (given == nullptr || *given == value) continue;
    section.refuse_without_effect({key}, "without comm.codec \"local\"");
  }
}

void parse_comm(const Json& value, bool wires, CommConfig* comm) {
  const ConfigSection section(value, "comm",
                              {"backend", "codec", "exact_first", "exact_every", "outer_every",
                               "outer_lr", "outer_momentum", "outer_wire", "reduce_dtype",
                               "bucket_bytes", "timeout_s", "warn_s", "report_dir"});
  section.read_text("backend", &comm->backend);
  if (comm->backend != "auto" && comm->backend != "shm" && comm->backend != "gloo")
    fail_unsupported("comm.backend", comm->backend, "\"auto\", \"shm\" or \"gloo\"");
  parse_codec(section, wires, comm);
  parse_outer(section, comm);
  section.read_text("reduce_dtype", &comm->reduce_dtype);
  if (comm->reduce_dtype != "auto" && comm->reduce_dtype != "gradient" &&
      comm->reduce_dtype != "fp32")
    fail_unsupported("comm.reduce_dtype", comm->reduce_dtype, "\"auto\", \"gradient\" or \"fp32\"");
  section.read_bytes("bucket_bytes", &comm->bucket_bytes, 0);
  section.read("timeout_s", &comm->timeout_s, 1e-3, 1e9, "seconds, a number from 0.001 to 1e9");
  section.read("warn_s", &comm->warn_s, 0.0, 1e9, "seconds, a number from 0 (never) to 1e9");
  section.read_text("report_dir", &comm->report_dir);
}

void parse_monitor(const Json& value, MonitorConfig* monitor) {
  const ConfigSection section(
      value, "monitor",
      {"path", "formats", "every", "console", "events", "trace_first", "trace_steps", "machine"});
  const std::vector<std::string> formats = {"jsonl", "csv", "tensorboard", "wandb"};
  section.read_text("path", &monitor->path);
  if (section.has("formats")) monitor->formats.clear();
  parse_names(section, "formats", "a list of " + quoted(formats), &monitor->formats);
  for (const std::string& format : monitor->formats)
    ConfigSection::choice_of(section.path("formats"), format, formats);
  section.read_int("every", &monitor->every, 1, "a whole number of steps >= 1");
  monitor->console = section.choice("console", monitor->console, {"none", "lines", "bar", "auto"});
  section.read_int("events", &monitor->events, 0, "a whole number >= 0 (0 = nothing is recorded)");
  section.read_int("trace_first", &monitor->trace_first, 0, "a whole number >= 0 (0 = no trace)");
  section.read_int("trace_steps", &monitor->trace_steps, 1, "a whole number >= 1");
  section.read_text("machine", &monitor->machine);
  const MonitorConfig none;
  if (monitor->path.empty()) {
    section.refuse_without_effect({"trace_first"}, "without \"monitor.path\"");
    if (monitor->formats != none.formats)
      section.refuse_without_effect({"formats"}, "without \"monitor.path\"");
  }
  if (monitor->trace_first == 0 && monitor->trace_steps != none.trace_steps)
    section.refuse_without_effect({"trace_steps"}, "while monitor.trace_first is 0");
  if (monitor->trace_first > 0 && monitor->events == 0)
    fail(
        "\"monitor.trace_first\" asks for a trace, but \"monitor.events\" is 0, so nothing is "
        "recorded");
}

void parse_signals(const ConfigSection& section, CheckpointConfig* checkpoint) {
  const std::vector<std::string> names = {"SIGTERM", "SIGUSR1", "SIGUSR2"};
  parse_names(section, "signals", "a list of " + quoted(names), &checkpoint->signals);
  for (const std::string& name : checkpoint->signals)
    ConfigSection::choice_of(section.path("signals"), name, names);
  if (!checkpoint->signals.empty() && checkpoint->path.empty())
    fail("\"checkpoint.signals\" requests saves on signals, which need \"checkpoint.path\"");
}

// The table is parsed before the offload keys, because their checks depend on its cells.
void parse_nested(const ConfigSection& top, Config* config) {
  if (const Json* value = top.find("table")) parse_table(*value, config);
  if (const Json* value = top.find("mesh")) parse_mesh(*value, &config->mesh);
  if (const Json* value = top.find("parallel")) parse_parallel(*value, config);
  if (const Json* value = top.find("dtypes")) parse_dtypes(*value, config);
  if (const Json* value = top.find("offload")) parse_offload(*value, config);
  if (const Json* value = top.find("quantize")) parse_quantize(*value, config);
  if (const Json* value = top.find("memory")) {
    const ConfigSection memory(*value, "memory", {"device_bytes", "host_bytes"});
    memory.read_bytes("device_bytes", &config->memory.device_bytes);
    memory.read_bytes("host_bytes", &config->memory.host_bytes);
  }
  if (const Json* value = top.find("optimizer")) config->optimizer = parse_optimizer(*value);
  if (const Json* value = top.find("schedule")) parse_schedule(*value, &config->schedule);
  if (const Json* value = top.find("batch")) parse_batch(*value, &config->batch);
  if (const Json* value = top.find("units")) parse_units(*value, &config->units);
  if (const Json* value = top.find("tiling")) parse_tiling(*value, &config->tiling);
  if (const Json* value = top.find("comm"))
    parse_comm(*value, has_lossy_wire(*config), &config->comm);
  parse_activations(top, config);
  parse_loss_scale(top, config);
  if (const Json* value = top.find("checkpoint")) {
    const ConfigSection section(*value, "checkpoint", {"path", "keep", "signals"});
    section.read_text("path", &config->checkpoint.path);
    parse_signals(section, &config->checkpoint);
    section.read_int("keep", &config->checkpoint.keep, 0, "a whole number >= 0 (0 = all)");
  }
  if (const Json* value = top.find("monitor")) parse_monitor(*value, &config->monitor);
}

}  // namespace

Config Config::parse(const std::string& json_text) {
  const Json json = parse_json(json_text);
  const ConfigSection top(
      json, "",
      {"strategy", "table",       "mesh",      "precision",      "dtypes",    "offload",
       "memory",   "activations", "optimizer", "schedule",       "batch",     "loss_scale",
       "clip",     "units",       "tiling",    "prefetch_bytes", "comm",      "checkpoint",
       "monitor",  "seed",        "nonfinite", "parallel",       "inference", "quantize"});
  Config config;
  config.strategy = top.choice("strategy", config.strategy, preset_names());
  if (const Json* value = top.find("precision"))
    config.precision = parse_compute_dtype("precision", *value);
  top.read("clip", &config.clip, 0.0, HUGE_VAL, "a number >= 0 (0 = off)");
  config.nonfinite = top.choice("nonfinite", config.nonfinite, {"error", "skip"});
  top.read_bytes("prefetch_bytes", &config.prefetch_bytes, 0);
  top.read_int("seed", &config.seed, 0, "a whole number >= 0");
  top.read("inference", &config.inference);
  parse_nested(top, &config);
  return config;
}

}  // namespace penstock
