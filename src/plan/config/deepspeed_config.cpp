#include "penstock/deepspeed_config.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/config/deepspeed_values.h"
#include "src/plan/config/section.h"

namespace penstock {

using config_text::lower;

namespace {

using Json = nlohmann::ordered_json;

using enum KeyFate;

constexpr const char* kDotted = "not a DeepSpeed key: write it inside its section";
constexpr const char* kAuto = "still \"auto\", so the default applies";

Json parse(const std::string& text) {
  std::vector<std::set<std::string>> open;  // the keys so far of each object that is being read
  const auto check = [&open](int, Json::parse_event_t event, const Json& key) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(key.get<std::string>()).second)
      fail_deepspeed(concat("the key ", key.dump(), " is in the config twice"));
    return true;
  };
  try {
    return Json::parse(text, check, true, /*ignore_comments=*/true);
  } catch (const nlohmann::json::exception& error) {
    fail_deepspeed(concat("the config is not valid JSON: ", error.what()));
  }
}

// Returns whether the value of a refused key selects the behaviour that the engine has anyway.
bool is_harmless(const std::string& key, const Json& value) {
  if (key == "optimizer.params.bias_correction") return value == true;
  return value == false || value == 0 || value == "" || value == "none" || value == "mean" ||
         value == "auto" || (value.is_structured() && value.empty());
}

const DeepSpeedKey* row_of(const std::string& key) {
  for (const DeepSpeedKey& row : deepspeed_keys()) {
    const std::string_view name = row.key;
    const bool section = name.ends_with(".*");
    if (section ? key.starts_with(name.substr(0, name.size() - 1)) : key == name) return &row;
  }
  return nullptr;
}

// The config's values by their full keys, as DeepSpeed reads them.
struct Leaves {
  std::vector<std::pair<std::string, Json>> all{};
  std::vector<std::pair<std::string, Json>> dotted{};  // keys of the top level with a dot

  void take(const Json& value, const std::string& key) {
    if (value.is_null()) return;
    if (!value.is_object()) return all.emplace_back(key, value), void();
    const auto enabled = value.find("enabled");
    const DeepSpeedKey* row = row_of(key + ".enabled");
    if (row != nullptr && row->fate == kRefused && enabled != value.end() &&
        (*enabled == false || *enabled == 0)) {
      return;  // the section is off
    }
    for (const auto& [name, inner] : value.items()) {
      if (key.empty() && name.find('.') != std::string::npos) {
        dotted.emplace_back(name, inner);
      } else {
        take(inner, key.empty() ? name : key + "." + name);
      }
    }
  }
  const Json* find(const std::string& key) const {
    for (const auto& [name, value] : all) {
      if (name == key) return &value;
    }
    return nullptr;
  }
  bool any_in(const std::string& prefix) const {
    return std::any_of(all.begin(), all.end(),
                       [&](const auto& leaf) { return leaf.first.starts_with(prefix); });
  }
  template <class T>
  T get(const std::string& key, T otherwise) const {
    const Json* value = find(key);
    return value == nullptr ? otherwise : value->get<T>();
  }
  double number(const std::string& key, double otherwise) const { return get(key, otherwise); }
  int64_t whole(const std::string& key, int64_t otherwise) const { return get(key, otherwise); }
  bool flag(const std::string& key, bool otherwise) const { return get(key, otherwise); }
  std::string text(const std::string& key, const std::string& otherwise) const {
    return get(key, otherwise);
  }
};

// ---- what becomes of each key

std::vector<std::string> names_in(const std::string& section) {
  std::vector<std::string> names;
  for (const DeepSpeedKey& row : deepspeed_keys()) {
    const std::string name = row.key;
    if (name.starts_with(section)) names.push_back(name.substr(section.size()));
  }
  return names;
}

GivenKey look_up(const std::string& key, const Json& value) {
  const DeepSpeedKey* row = row_of(key);
  if (row == nullptr) {
    const size_t dot = key.rfind('.');
    const std::string section = dot == std::string::npos ? "" : key.substr(0, dot + 1);
    if (section.empty() || names_in(section).empty()) {
      return {key, value.dump(), kNoEffect, "not a DeepSpeed key"};
    }
    const std::string near = nearest(key.substr(dot + 1), names_in(section));
    fail_deepspeed(concat("unknown key \"", key, "\"",
                          near.empty() ? "" : concat("; did you mean \"", section, near, "\"?")));
  }
  if (row->fate == kRefused && !is_harmless(key, value))
    fail_deepspeed(
        concat("\"", key, "\" is ", value.dump(), ", which is not supported: ", row->note));
  return {key, value.dump(), row->fate == kRefused ? kNoEffect : row->fate, row->note};
}

void refuse(const Leaves& given, const std::string& key, const std::string& allowed) {
  fail_deepspeed(concat("\"", key, "\" is ", given.find(key)->dump(), "; allowed: ", allowed));
}

std::string precision_of(const std::string& dtype) {
  if (dtype.find("bf") != std::string::npos) return "bf16";
  return dtype.ends_with("16") || dtype == "half" ? "fp16" : "fp32";
}

// Refuses what DeepSpeed does not combine with summed gradients. Two of these sections are refused
// on their own, too, but scripts match DeepSpeed's words for the combination.
void check_sum(const Leaves& given, const Json& config, int64_t stage) {
  const std::string sum = "\"gradient_allreduce_op\" is \"sum\", which is not supported with ";
  if (stage == 3)
    refuse(given, "gradient_allreduce_op",
           "\"mean\", because \"sum\" is not supported with ZeRO stage 3");
  if (config.value("zero_optimization", Json::object()).contains("zenflow"))
    fail_deepspeed(concat(sum, "ZenFlow: remove \"zero_optimization.zenflow\""));
  const Json* const compiled = given.find("compile.deepcompile");
  if (compiled != nullptr && !is_harmless("compile.deepcompile", *compiled))
    fail_deepspeed(concat(sum, "DeepCompile: remove \"compile.deepcompile\""));
}

// Refuses combinations of values that DeepSpeed refuses.
void check_together(const Leaves& given, const Json& config) {
  const std::string zero = "zero_optimization.";
  const int64_t stage = given.whole(zero + "stage", 0);
  const Json section = config.value("zero_optimization", Json::object());
  constexpr std::array<std::pair<const char*, const char*>, 3> kOld = {
      {{"cpu_offload", "offload_optimizer"},
       {"cpu_offload_param", "offload_param"},
       {"stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"}}};
  for (const auto& [old, replacement] : kOld) {
    if (section.contains(old) && section.contains(replacement))
      fail_deepspeed(concat("\"", zero, old, "\" and \"", zero, replacement,
                            "\" are the same setting: keep only \"", zero, replacement, "\""));
  }
  if (given.text("gradient_allreduce_op", "mean") == "sum") check_sum(given, config, stage);
  if (section.contains("zenflow"))  // its presence turns it on
    fail_deepspeed(concat("\"", zero, "zenflow\" is ", section["zenflow"].dump(),
                          ", which is not supported yet: remove the section"));
  if (!given.flag(zero + "compute_grad_norm", true) && stage != 1 && stage != 2)
    fail_deepspeed(
        concat("\"", zero, "compute_grad_norm\" is false; allowed: true at stage ", stage));
  if (given.number(zero + "offload_optimizer.ratio", 1.0) < 1.0 && stage != 3)
    refuse(given, zero + "offload_optimizer.ratio", concat("1.0 at stage ", stage));
  const bool bf16 = given.flag("bf16.enabled", false), fp16 = given.flag("fp16.enabled", false);
  const std::string precision = bf16 ? "bf16" : fp16 ? "fp16" : "fp32";
  if (precision_of(given.text("data_types.param_dtype", precision)) != precision)
    refuse(given, "data_types.param_dtype",
           concat("\"", precision, "\", which bf16.enabled and fp16.enabled set"));
  if (!fp16 || given.number("fp16.loss_scale", 0.0) > 0) return;
  for (const char* key : {"fp16.loss_scale_window", "fp16.min_loss_scale"}) {
    if (given.whole(key, 1) <= 0) refuse(given, key, "a whole number of at least 1");
  }
}

// ---- the native config

// Returns the number of tensor ranks.
int tensor_of(const Leaves& given, int world) {
  const std::string size = "tensor_parallel.autotp_size", again = "tensor_parallel.tp.tp_size";
  const int64_t tensor = given.whole(size, 0) == 0 ? 1 : given.whole(size, 0);
  if (tensor < 1 || tensor > world || world % tensor != 0)
    refuse(given, size, concat("0, or a divisor of the number of ranks, ", world));
  const int64_t said = given.whole(again, 1);
  if (said != 1 && said != tensor) refuse(given, again, concat("1, or autotp_size, ", tensor));
  return static_cast<int>(tensor);
}

// Returns the number of sequence ranks.
int sequence_of(const Leaves& given, int ranks) {
  const std::string size = "sequence_parallel_size";
  const int64_t sequence = given.whole(size, 0) == 0 ? 1 : given.whole(size, 0);
  if (sequence < 1 || sequence > ranks || ranks % sequence != 0)
    refuse(given, size, concat("0, or a divisor of the number of data ranks, ", ranks));
  return static_cast<int>(sequence);
}

// Returns the number of nodes, from the number of ranks per node.
int nodes_of(const Leaves& given, const std::string& key, int64_t ranks, int data) {
  if (ranks > data || data % ranks != 0)
    refuse(given, key, concat("a divisor of the number of data ranks, ", data));
  return static_cast<int>(data / ranks);
}

void take_strategy(const Leaves& given, int data, Json& native) {
  const std::string zero = "zero_optimization.";
  const int64_t stage = given.whole(zero + "stage", 0);
  native["strategy"] = stage == 0 ? "ddp" : concat("zero", stage);
  const int64_t secondary = given.whole(zero + "zero_hpz_partition_size", 1);
  const int64_t shard = given.whole(zero + "mics_shard_size", -1);
  if (stage == 3 && shard > 0) {
    native["strategy"] = "mics";
    native["mesh"]["node"] = nodes_of(given, zero + "mics_shard_size", shard, data);
  } else if (stage == 3 && secondary > 1) {
    native["strategy"] = "hpz";
    native["mesh"]["node"] = nodes_of(given, zero + "zero_hpz_partition_size", secondary, data);
  }
  for (const auto& [key, role] : {std::pair("zero_quantized_weights", "param"),
                                  std::pair("zero_quantized_gradients", "grad")}) {
    if (stage == 3 && given.flag(zero + key, false)) native["table"]["wire"][role] = "int8";
  }
  const bool feeds_back = given.any_in(zero + "zeropp_loco_param.");
  if (stage == 3 && feeds_back && given.flag(zero + "zero_quantized_gradients", false)) {
    native["table"]["wire"]["grad"] = "int4/128/nearest";
    native["table"]["residual"]["rest"] = "PP@device:bf16";
  }
}

void take_offload(const Leaves& given, Json& native) {
  const std::string zero = "zero_optimization.";
  Json offload = Json::object();
  const auto take = [&](const std::string& section, const char* old, const char* role) {
    std::string device = given.text(zero + section + ".device", "none");
    if (given.flag(zero + old, false)) device = "cpu";
    if (device == "none") return;
    offload[role] = device == "cpu" ? "host" : "disk";
    if (device == "cpu") return;
    const std::string path = given.text(zero + section + ".nvme_path", "");
    if (path.empty())
      fail_deepspeed(concat("\"", zero, section, "\" has device \"nvme\" and no nvme_path"));
    if (offload.contains("path") && offload["path"] != path)
      fail_deepspeed(
          concat("\"", zero, section, ".nvme_path\" is \"", path,
                 "\", but optimizer and parameters share one folder: ", offload["path"].dump()));
    offload["path"] = path;
  };
  take("offload_optimizer", "cpu_offload", "optimizer");
  const bool older = given.flag(zero + "cpu_offload_params", false);
  if (given.whole(zero + "stage", 0) == 3)
    take("offload_param", older ? "cpu_offload_params" : "cpu_offload_param", "params");
  if (!offload.empty()) native["offload"] = offload;
}

void take_precision(const Leaves& given, Json& native) {
  const bool bf16 = given.flag("bf16.enabled", false), fp16 = given.flag("fp16.enabled", false);
  if (bf16 && fp16) fail_deepspeed("\"bf16.enabled\" and \"fp16.enabled\" are both true");
  if (bf16 || fp16)
    native["precision"] = bf16 ? "bf16" : "fp16";  // otherwise the model's own dtypes
  if (!fp16) return;
  const double fixed = given.number("fp16.loss_scale", 0.0);
  if (fixed > 0 && (fixed < 1 || fixed > 0x1p40))
    refuse(given, "fp16.loss_scale", "0, or a number from 1 to 2^40");
  const int64_t power = given.whole("fp16.initial_scale_power", 16);
  if (power < 0 || power > 40) refuse(given, "fp16.initial_scale_power", "0 to 40");
  if (fixed > 0) {
    native["loss_scale"] = {{"initial", fixed}, {"window", 0}};
    return;
  }
  const double initial = static_cast<double>(int64_t{1} << power);
  native["loss_scale"] = {
      {"initial", initial},
      {"window", given.whole("fp16.loss_scale_window", 1000)},
      {"min", std::min(initial, std::max(1.0, given.number("fp16.min_loss_scale", 1.0)))},
      {"settle", 1}};
  if (given.whole("zero_optimization.stage", 0) == 0) return;
  const bool consecutive = given.flag("fp16.consecutive_hysteresis", false);
  native["loss_scale"]["hysteresis"] = std::max<int64_t>(1, given.whole("fp16.hysteresis", 2));
  native["loss_scale"]["refill"] = consecutive ? "step" : "growth";
  native["nonfinite"] = "error";  // only if the scale is exhausted
}

// DeepSpeed's names of optimizers, with the native names and DeepSpeed's defaults.
struct KeyKind {
  const char* name;
  const char* native;
  Json defaults;
};

constexpr const char* kOneBit = "onebitadam";
constexpr const char* kZeroOne = "zerooneadam";
constexpr const char* kBiasUnread = "DeepSpeed never corrects these optimizers' moments";

bool is_optimizer(const Leaves& given, const char* name) {
  return lower(given.text("optimizer.type", "")) == name;
}

bool sends_one_bit(const Leaves& given) {
  return is_optimizer(given, kOneBit) || is_optimizer(given, kZeroOne);
}

// Both optimizers have steps that send one bit per value and keep second moments unchanged. The
// other steps are exact. 1-bit Adam has no exact steps from `freeze_step` on. In DeepSpeed, 0/1
// Adam starts with exact steps, which become rarer (every second step after `var_update_scaler`
// steps, and so on). Here, every `var_update_scaler`-th step is exact after as many exact steps. In
// DeepSpeed, each rank has the whole optimizer state; zero1 gives the same weights.
void take_one_bit(const Leaves& given, Json& native) {
  if (given.flag("fp16.enabled", false)) {
    refuse(given, "optimizer.type",
           "\"AdamW\" with fp16. Optimizers that send one bit per value need bf16 or fp32 here");
  }
  native["comm"]["codec"] = "1bit";
  if (is_optimizer(given, kZeroOne)) {
    const int64_t interval =
        std::max<int64_t>(2, given.whole("optimizer.params.var_update_scaler", 16));
    native["comm"]["exact_first"] = interval;
    native["comm"]["exact_every"] = interval;
  } else {
    const int64_t freeze = given.whole("optimizer.params.freeze_step", 100'000);
    native["comm"]["exact_first"] = std::max<int64_t>(1, freeze);
  }
  if (native["strategy"] == "ddp") native["strategy"] = "zero1";
}

void take_optimizer(const Leaves& given, Json& native) {
  static const KeyKind kKinds[] = {
      {"adam", "AdamW", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
      {"adamw", "AdamW", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
      {"lion", "Lion", {{"lr", 1e-3}, {"betas", {0.9, 0.999}}, {"weight_decay", 0.0}}},
      {"adagrad", "Adagrad", {{"lr", 1e-2}, {"eps", 1e-10}, {"weight_decay", 0.0}}},
      {"sgd", "SGD", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
      {kOneBit, "AdamW", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
      {kZeroOne, "AdamW", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
  };
  const bool low = given.flag("bf16.bf16_optimizer_states", false) ||
                   !given.flag("optimizer.params.fp32_optimizer_states", true);
  if (given.find("optimizer.type") == nullptr) {
    if (low)
      native["optimizer"] = {{"moments_dtype", "bf16"}};  // for an optimizer object of the user
    return;
  }
  const std::string type = lower(given.text("optimizer.type", ""));
  const auto* const kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                        [&](const KeyKind& one) { return type == one.name; });
  if (kind == std::end(kKinds))
    refuse(given, "optimizer.type",
           "\"Adam\", \"AdamW\", \"Lion\", \"Adagrad\", \"SGD\", \"OneBitAdam\", "
           "\"ZeroOneAdam\"; or pass a torch optimizer");
  Json optimizer = {{"type", kind->native}};
  optimizer.update(kind->defaults);
  const bool decays = given.flag("optimizer.params.adam_w_mode", true);
  const bool decoupled = type == "adamw" || (type == "adam" && decays);
  if (decoupled && given.flag("optimizer.params.torch_adam", false)) {
    optimizer["weight_decay"] = 0.01;  // the default of torch.optim.AdamW
  }
  for (const char* key :
       {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay"}) {
    const Json* value = given.find(concat("optimizer.params.", key));
    if (value != nullptr) optimizer[key] = *value;
  }
  if (type == "adam" && !decoupled) optimizer["type"] = "Adam";
  if (sends_one_bit(given)) take_one_bit(given, native);
  if (low) optimizer["moments_dtype"] = "bf16";
  native["optimizer"] = optimizer;
}

void take_batch(const Leaves& given, int data, Json& native) {
  const int64_t global = given.whole("train_batch_size", 0);
  int64_t micro = given.whole("train_micro_batch_size_per_gpu", 0);
  int64_t accumulate = given.whole("gradient_accumulation_steps", 0);
  if (global > 0 && micro == 0) {
    const int64_t parts = data * std::max<int64_t>(1, accumulate);
    if (global % parts != 0)
      refuse(given, "train_batch_size",
             concat("a multiple of data ranks times gradient_accumulation_steps, ", parts));
    micro = global / parts;
    accumulate = std::max<int64_t>(1, accumulate);
  }
  Json batch = Json::object();
  if (global > 0) batch["global"] = global;
  if (micro > 0) batch["micro"] = micro;
  if (accumulate > 0) batch["accumulate"] = accumulate;
  if (!batch.empty()) native["batch"] = batch;
}

Json native_of(const Leaves& given, int world) {
  Json native = Json::object();
  const int tensor = tensor_of(given, world), data = world / tensor;
  const int sequence = sequence_of(given, data);
  if (tensor > 1) native["mesh"]["tensor"] = tensor;
  if (sequence > 1) native["mesh"]["sequence"] = sequence;
  native["nonfinite"] = "skip";
  take_strategy(given, data, native);
  take_offload(given, native);
  take_precision(given, native);
  take_optimizer(given, native);
  take_batch(given, data / sequence, native);
  native["clip"] = std::max(0.0, given.number("gradient_clipping", 1.0));  // negative: off
  const int64_t ahead = given.whole("zero_optimization.stage3_prefetch_bucket_size", 0);
  if (ahead > 0)
    native["prefetch_bytes"] =
        std::min(ahead, int64_t{1} << 50) * (native.contains("precision") ? 2 : 4);
  return native;
}

// Native keys that DeepSpeed does not have.
constexpr std::array kOurs = {"strategy", "table",      "mesh",     "precision", "dtypes",
                              "offload",  "memory",     "batch",    "schedule",  "activations",
                              "clip",     "units",      "seed",     "tiling",    "prefetch_bytes",
                              "comm",     "loss_scale", "nonfinite"};

Json renamed(Json config) {
  if (config.contains("bfloat16")) {
    if (!config.contains("bf16") || config["bf16"].is_null()) config["bf16"] = config["bfloat16"];
    config.erase("bfloat16");
  }
  const auto zero = config.find("zero_optimization");
  if (zero != config.end() && zero->is_boolean()) {
    const int stage = zero->get<bool>() ? 1 : 0;
    config["zero_optimization"] = {{"stage", stage}};
  }
  return config;
}

}  // namespace

std::string TranslatedConfig::warning() const {
  std::map<std::string, std::vector<std::string>> by_note;
  for (const GivenKey& key : given) {
    if (key.fate == kNoEffect) by_note[key.note].push_back(key.key);
  }
  std::string text;
  for (const auto& [note, keys] : by_note) {
    text += concat("\n  ", join(keys, ", "), ": ", note);
  }
  return text.empty() ? "" : "keys of the DeepSpeed config without effect:" + text;
}

std::string plain_json(const std::string& json_text) { return parse(json_text).dump(); }

bool is_deepspeed_config(const std::string& json_text) {
  const Json config = Json::parse(json_text, nullptr, false, true);
  if (!config.is_object()) return false;
  for (const auto& [key, value] : config.items()) {
    if (key == "optimizer") {
      if (value.is_object() && value.contains("params")) return true;
    } else if (key != "checkpoint" &&
               (key == "bfloat16" || row_of(key) != nullptr || !names_in(key + ".").empty())) {
      return true;
    }
  }
  return false;
}

namespace {

// Marks a key that has no effect because of other keys of the config.
void note_effect(const Leaves& leaves, int world, GivenKey& key) {
  const bool shards = key.key.ends_with("zero_hpz_partition_size") ||
                      key.key.ends_with("mics_shard_size") ||
                      key.key.ends_with("zero_quantized_weights") ||
                      key.key.ends_with("zero_quantized_gradients") ||
                      key.key.find("zeropp_loco_param") != std::string::npos ||
                      key.key.find("offload_param") != std::string::npos;
  if (shards && leaves.whole("zero_optimization.stage", 0) < 3) {
    key.fate = kNoEffect;
    key.note = "parameters are not sharded below stage 3";
  }
  if (key.key == "optimizer.params.freeze_step" && !is_optimizer(leaves, kOneBit)) {
    key.fate = kNoEffect;
    key.note = "only OneBitAdam uses it";
  }
  if (key.key == "optimizer.params.var_update_scaler" && !is_optimizer(leaves, kZeroOne)) {
    key.fate = kNoEffect;
    key.note = "only ZeroOneAdam uses it";
  }
  if (key.key.find("zeropp_loco_param") != std::string::npos &&
      !leaves.flag("zero_optimization.zero_quantized_gradients", false)) {
    key.fate = kNoEffect;
    key.note = "zero_quantized_gradients is off";
  }
  if (key.key == "data_types.buffer_dtype" && !leaves.flag("bf16.enabled", false) &&
      !leaves.flag("fp16.enabled", false)) {
    key.fate = kNoEffect;
    key.note = "buffers keep their dtypes without bf16 and fp16";
  }
  const bool of_tensor = key.key.starts_with("tensor_parallel.") && key.fate == kTaken;
  if (of_tensor && key.key != "tensor_parallel.autotp_size" && tensor_of(leaves, world) == 1) {
    key.fate = kNoEffect;
    key.note = "autotp_size asks for no tensor ranks";
  } else if (key.key == "tensor_parallel.preset_model" &&
             leaves.find("tensor_parallel.partition_config.layer_specs") == nullptr) {
    key.fate = kNoEffect;
    key.note = "without layer_specs the model's own rules apply in any case";
  }
}

}  // namespace

TranslatedConfig translate_deepspeed_config(const std::string& json_text, int world) {
  const Json given = parse(json_text);
  if (!given.is_object()) fail_deepspeed("the config is not a JSON object");
  const DeepSpeedValues values = read_deepspeed_values(renamed(given));
  const Json& config = values.config;
  for (const char* key : kOurs) {
    if (config.contains(key))
      fail_deepspeed(
          concat("\"", key, "\" is a native key of Penstock: write the config in one dialect"));
  }
  Leaves leaves;
  leaves.take(config, "");
  TranslatedConfig translated;
  check_together(leaves, config);
  for (const auto& [key, value] : leaves.all) {
    const bool unread = key == "optimizer.params.bias_correction" && sends_one_bit(leaves);
    translated.given.push_back(unread ? GivenKey{key, value.dump(), kNoEffect, kBiasUnread}
                                      : look_up(key, value));
  }
  for (const auto& [key, value] : leaves.dotted)
    translated.given.push_back({key, value.dump(), kNoEffect, kDotted});
  for (const auto* keys : {&values.auto_keys, &values.left_over}) {
    for (const std::string& key : *keys)
      translated.given.push_back({key, "\"auto\"", kNoEffect, kAuto});
  }
  translated.left_over = values.left_over;
  translated.values = config.dump();
  translated.native = native_of(leaves, world).dump();
  for (GivenKey& key : translated.given) note_effect(leaves, world, key);
  const Json none;
  const Json& scheduler = config.contains("scheduler") ? config["scheduler"] : none;
  if (scheduler.is_object() && !scheduler.value("type", none).is_null())
    translated.scheduler = scheduler.dump();
  return translated;
}

}  // namespace penstock
