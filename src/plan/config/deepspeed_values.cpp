#include "src/plan/config/deepspeed_values.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/config/section.h"

namespace penstock {

namespace deepspeed_values {
namespace {

using config_text::lower;
using Json = nlohmann::ordered_json;

// [Note: Values of DeepSpeed's configs] DeepSpeed reads most sections with pydantic, which converts
// values: "1e8" is not a whole number, but "100", 100.0 and true are. Such a section drops keys
// with the value "auto" and refuses unknown keys. The top level, and sections that are not pydantic
// models, are dicts to DeepSpeed: their values stay as they are, "auto" stays text, and operations
// on values may fail later. Each row below has the type of one key;
// tests/weekly/deepspeed_configs.py compares the table with DeepSpeed's parser.
enum class ValueType {
  kModel,    // a section that is a pydantic model: fixed keys
  kSection,  // a section that is a dict: any keys
  kFlag,     // pydantic's bool: 0, 1, "true", "no", ...
  kWhole,    // pydantic's int
  kNumber,   // pydantic's float
  kText,
  kTexts,   // text or a list of strings
  kList,    // any list
  kChoice,  // one of `choices`, in any case
  kExact,   // one of `choices`
  kCount,   // a whole number in a dict; text is refused
  kReal,    // a number in a dict; text is refused
  kTruth,   // a flag in a dict: true, false, 0 or 1
  kObject,  // any value
};

constexpr double kAny = std::numeric_limits<double>::infinity();

struct ValueRow {
  const char* key;
  ValueType type;
  double low = -kAny, high = kAny;
  bool null = false;  // null is allowed, and the same as a missing key
  const char* choices = "";
  bool strict = false;  // true is not a number, and "1.0" is not a whole number
};

using enum ValueType;

constexpr ValueRow optional(const char* key, ValueType type) {
  return {key, type, -kAny, kAny, true};
}
constexpr ValueRow choice(const char* key, ValueType type, const char* choices, bool null = false) {
  return {key, type, -kAny, kAny, null, choices};
}

constexpr const char* kDtypes =
    "fp32 float32 float torch.float32 fp16 float16 half torch.float16 bf16 bfloat16 torch.bfloat16";

constexpr ValueRow kRows[] = {
    {"train_batch_size", kCount, 1, kAny, true},
    {"train_micro_batch_size_per_gpu", kCount, 1, kAny, true},
    {"gradient_accumulation_steps", kCount, 1, kAny, true},
    {"gradient_clipping", kReal},
    {"sequence_parallel_size", kCount, 0},
    optional("vocabulary_size", kReal),
    {"wall_clock_breakdown", kTruth},
    {"managed_gradient_accumulation", kTruth},
    choice("communication_data_type", kChoice, "fp32 fp16 bf16", true),
    choice("seq_parallel_communication_data_type", kChoice, "fp32 fp16 bf16", true),
    choice("gradient_allreduce_op", kChoice, "mean sum"),
    {"optimizer", kSection},
    optional("optimizer.type", kText),
    optional("optimizer.params", kSection),
    {"optimizer.params.lr", kReal},
    {"optimizer.params.eps", kReal},
    {"optimizer.params.weight_decay", kReal},
    {"optimizer.params.momentum", kReal},
    {"optimizer.params.dampening", kReal},
    {"optimizer.params.lr_decay", kReal},
    {"optimizer.params.max_grad_norm", kReal},
    {"optimizer.params.freeze_step", kWhole, 0},
    {"optimizer.params.var_freeze_step", kWhole, 0},
    {"optimizer.params.var_update_scaler", kWhole, 0},
    {"optimizer.params.local_step_scaler", kWhole, 0},
    {"optimizer.params.local_step_clipper", kWhole, 0},
    {"optimizer.params.nesterov", kTruth},
    {"optimizer.params.adam_w_mode", kTruth},
    {"optimizer.params.torch_adam", kTruth},
    {"optimizer.params.fp32_optimizer_states", kTruth},
    {"scheduler", kSection},
    optional("scheduler.type", kText),
    optional("scheduler.params", kSection),
    optional("bf16", kModel),
    {"bf16.enabled", kFlag},
    {"bf16.immediate_grad_update", kFlag},
    {"bf16.check_grad_overflow", kFlag},
    {"bf16.bf16_master_weights_and_grads", kFlag},
    {"bf16.bf16_optimizer_states", kFlag},
    {"fp16", kModel},
    {"fp16.enabled", kFlag},
    {"fp16.auto_cast", kFlag},
    {"fp16.loss_scale", kNumber, 0, std::numeric_limits<double>::max(), false, "", true},
    {"fp16.initial_scale_power", kWhole},
    {"fp16.loss_scale_window", kWhole, -kAny, kAny, false, "", true},
    {"fp16.hysteresis", kWhole},
    {"fp16.consecutive_hysteresis", kFlag},
    {"fp16.min_loss_scale", kWhole, -kAny, kAny, false, "", true},
    {"fp16.fp16_master_weights_and_grads", kFlag},
    {"zero_optimization", kModel},
    {"zero_optimization.stage", kWhole, 0, 3},
    {"zero_optimization.contiguous_gradients", kFlag},
    {"zero_optimization.reduce_scatter", kFlag},
    {"zero_optimization.reduce_bucket_size", kWhole, 1},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kFlag},
    {"zero_optimization.allgather_partitions", kFlag},
    {"zero_optimization.allgather_bucket_size", kWhole, 0},
    optional("zero_optimization.overlap_comm", kFlag),
    {"zero_optimization.compute_grad_norm", kFlag},
    {"zero_optimization.load_from_fp32_weights", kFlag},
    {"zero_optimization.elastic_checkpoint", kFlag},
    optional("zero_optimization.offload_param", kModel),
    choice("zero_optimization.offload_param.device", kExact, "none cpu nvme"),
    optional("zero_optimization.offload_param.nvme_path", kText),
    {"zero_optimization.offload_param.buffer_count", kWhole, 0},
    {"zero_optimization.offload_param.buffer_size", kWhole, 0},
    {"zero_optimization.offload_param.max_in_cpu", kWhole, 0},
    {"zero_optimization.offload_param.pin_memory", kFlag},
    optional("zero_optimization.offload_optimizer", kModel),
    choice("zero_optimization.offload_optimizer.device", kExact, "none cpu nvme"),
    optional("zero_optimization.offload_optimizer.nvme_path", kText),
    {"zero_optimization.offload_optimizer.buffer_count", kWhole, 0},
    {"zero_optimization.offload_optimizer.pin_memory", kFlag},
    {"zero_optimization.offload_optimizer.pipeline_read", kFlag},
    {"zero_optimization.offload_optimizer.pipeline_write", kFlag},
    {"zero_optimization.offload_optimizer.fast_init", kFlag},
    {"zero_optimization.offload_optimizer.ratio", kNumber, 0, 1},
    {"zero_optimization.offload_optimizer.super_offload", kFlag},
    {"zero_optimization.offload_optimizer.cpuadam_cores_perc", kNumber, 0, 1},
    {"zero_optimization.sub_group_size", kWhole, 0},
    optional("zero_optimization.cpu_offload", kFlag),
    optional("zero_optimization.cpu_offload_param", kFlag),
    optional("zero_optimization.cpu_offload_params", kFlag),  // only in older versions
    optional("zero_optimization.cpu_offload_use_pin_memory", kFlag),
    {"zero_optimization.stage3_prefetch_bucket_size", kWhole, 0},
    {"zero_optimization.stage3_param_persistence_threshold", kWhole, 0},
    {"zero_optimization.stage3_model_persistence_threshold", kWhole, 0},
    {"zero_optimization.stage3_max_live_parameters", kWhole, 0},
    {"zero_optimization.stage3_max_reuse_distance", kWhole, 0},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", kFlag},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save", kFlag},
    {"zero_optimization.stage3_module_granularity_threshold", kWhole},
    {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kFlag},
    {"zero_optimization.stage3_allgather_sequential", kFlag},
    {"zero_optimization.ignore_unused_parameters", kFlag},
    {"zero_optimization.legacy_stage1", kFlag},
    {"zero_optimization.round_robin_gradients", kFlag},
    {"zero_optimization.parameter_alignment", kFlag},
    {"zero_optimization.zero_hpz_partition_size", kWhole, 0},
    {"zero_optimization.zero_quantized_weights", kFlag},
    {"zero_optimization.zero_quantized_nontrainable_weights", kFlag},
    {"zero_optimization.zero_quantized_gradients", kFlag},
    {"zero_optimization.mics_shard_size", kWhole, -1},             // only in older versions
    {"zero_optimization.mics_hierarchical_params_gather", kFlag},  // only in older versions
    optional("zero_optimization.zeropp_loco_param", kSection),     // only in older versions
    {"zero_optimization.zeropp_loco_param.err_beta", kReal},
    {"zero_optimization.zeropp_loco_param.reset_T", kReal},
    optional("zero_optimization.zenflow", kSection),
    {"zero_optimization.memory_efficient_linear", kFlag},
    {"zero_optimization.pipeline_loading_checkpoint", kFlag},
    {"zero_optimization.override_module_apply", kFlag},
    {"zero_optimization.log_trace_cache_warnings", kFlag},
    {"zero_optimization.enable_sanity_checks", kFlag},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kFlag},
    optional("zero_optimization.leaf_module", kModel),
    {"zero_optimization.leaf_module.classes", kTexts},
    {"zero_optimization.leaf_module.names", kTexts},
    {"zero_optimization.leaf_module.name_suffixes", kTexts},
    optional("aio", kSection),
    {"activation_checkpointing", kSection},
    {"autotuning", kSection},
    {"data_types", kSection},
    choice("data_types.grad_accum_dtype", kExact, kDtypes, true),
    choice("data_types.param_dtype", kExact, kDtypes, true),
    choice("data_types.buffer_dtype", kExact, kDtypes, true),
    {"data_efficiency", kSection},
    {"pipeline", kSection},
    {"checkpoint", kSection},
    choice("checkpoint.tag_validation", kChoice, "ignore warn fail"),
    {"checkpoint.parallel_write", kSection},
    {"checkpoint.parallel_write.pipeline_stage", kTruth},
    optional("checkpoint.writer", kSection),
    choice("checkpoint.writer.type", kChoice, "mock python fast", true),
    choice("checkpoint.writer.data_parallel", kChoice, "replica socket machine", true),
    {"flops_profiler", kSection},
    {"flops_profiler.enabled", kTruth},
    {"timers", kSection},
    {"timers.throughput", kModel},
    {"timers.throughput.enabled", kFlag},
    {"timers.throughput.synchronized", kFlag},
    {"comms_logger", kModel},
    {"comms_logger.enabled", kFlag},
    {"comms_logger.prof_all", kFlag},
    {"comms_logger.prof_ops", kList},
    {"comms_logger.verbose", kFlag},
    {"comms_logger.debug", kFlag},
    {"tensorboard", kModel},
    {"tensorboard.enabled", kFlag},
    {"tensorboard.output_path", kText},
    {"tensorboard.job_name", kText},
    {"csv_monitor", kModel},
    {"csv_monitor.enabled", kFlag},
    {"csv_monitor.output_path", kText},
    {"csv_monitor.job_name", kText},
    {"wandb", kModel},
    {"wandb.enabled", kFlag},
    optional("wandb.group", kText),
    optional("wandb.team", kText),
    {"wandb.project", kText},
    {"comet", kModel},
    {"comet.enabled", kFlag},
    {"comet.samples_log_interval", kWhole},
    optional("comet.project", kText),
    optional("comet.workspace", kText),
    optional("comet.api_key", kText),
    optional("comet.experiment_name", kText),
    optional("comet.experiment_key", kText),
    optional("comet.online", kFlag),
    choice("comet.mode", kExact, "get create get_or_create", true),
    {"tensor_parallel", kModel},
    optional("tensor_parallel.dtype", kText),
    {"tensor_parallel.autotp_size", kWhole},
    {"tensor_parallel.tp_overlap_comm", kFlag},
    optional("tensor_parallel.vocab_parallel_lm_head", kFlag),
    choice("tensor_parallel.vocab_parallel_ce_backend", kExact, "torch liger"),
    {"tensor_parallel.tp", kModel},
    {"tensor_parallel.tp.tp_size", kWhole},
    {"tensor_parallel.tp.tp_grain_size", kWhole},
    optional("tensor_parallel.tp.mpu", kObject),
    optional("tensor_parallel.tp.tp_group", kObject),
    optional("tensor_parallel.injection_policy_tuple", kList),
    optional("tensor_parallel.partition_config", kSection),
    optional("tensor_parallel.preset_model", kText),
    {"tensor_parallel.keep_module_on_host", kFlag},
    {"tensor_parallel.kernel_inject", kFlag},
    {"torch_autocast", kSection},
    {"torch_autocast.lower_precision_safe_modules", kTexts},
    {"hybrid_engine", kModel},
    {"hybrid_engine.enabled", kFlag},
    {"hybrid_engine.max_out_tokens", kWhole, 1},
    {"hybrid_engine.inference_tp_size", kWhole},
    {"hybrid_engine.release_inference_cache", kFlag},
    {"hybrid_engine.pin_parameters", kFlag},
    {"hybrid_engine.tp_gather_partition_size", kWhole},
    {"hybrid_engine.enable_cuda_graph", kFlag},
};

// Names that DeepSpeed accepts besides the documented ones.
constexpr std::pair<const char*, const char*> kOtherNames[] = {
    {"zero_optimization.prefetch_bucket_size", "stage3_prefetch_bucket_size"},
    {"zero_optimization.param_persistence_threshold", "stage3_param_persistence_threshold"},
    {"zero_optimization.model_persistence_threshold", "stage3_model_persistence_threshold"},
    {"zero_optimization.max_live_parameters", "stage3_max_live_parameters"},
    {"zero_optimization.max_reuse_distance", "stage3_max_reuse_distance"},
    {"zero_optimization.gather_16bit_weights_on_model_save",
     "stage3_gather_16bit_weights_on_model_save"},
    {"zero_optimization.module_granularity_threshold", "stage3_module_granularity_threshold"},
    {"zero_optimization.use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"},
    {"zero_optimization.allgather_sequential", "stage3_allgather_sequential"},
    {"tensor_parallel.tensor_parallel", "tp"},
    {"tensor_parallel.replace_with_kernel_inject", "kernel_inject"},
};

const ValueRow* row_of(const std::string& key) {
  const auto* const found = std::find_if(std::begin(kRows), std::end(kRows),
                                         [&](const ValueRow& row) { return key == row.key; });
  return found == std::end(kRows) ? nullptr : found;
}

// ---- one value

std::string trimmed(const std::string& text) {
  const char* const blanks = " \t\n\r\f\v";
  const size_t first = text.find_first_not_of(blanks);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Returns the text without its underscores, or nothing if an underscore is not between two digits.
std::optional<std::string> without_underscores(const std::string& text) {
  std::string kept;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      kept += text[i];
    } else if (i == 0 || i + 1 == text.size() || !is_digit(text[i - 1]) || !is_digit(text[i + 1])) {
      return std::nullopt;
    }
  }
  return kept;
}

// Reads text as Python's float() does.
std::optional<double> number_in(const std::string& text) {
  const std::optional<std::string> digits = without_underscores(trimmed(text));
  if (!digits || digits->empty() || digits->find_first_of("xXpP(") != std::string::npos)
    return std::nullopt;
  char* end = nullptr;
  const double number = std::strtod(digits->c_str(), &end);
  if (end != digits->c_str() + digits->size()) return std::nullopt;
  return number;
}

// Returns whether the text is a whole number: digits, optionally with a fraction of zeros.
bool is_whole_text(const std::string& text, bool strict) {
  std::string digits = trimmed(text);
  const size_t dot = digits.find('.');
  if (dot != std::string::npos) {
    const std::string zeros = digits.substr(dot + 1);
    if (strict || zeros.empty() || zeros.find_first_not_of('0') != std::string::npos) return false;
    digits.resize(dot);
  }
  if (!digits.empty() && (digits[0] == '-' || digits[0] == '+')) digits.erase(0, 1);
  return !digits.empty() && digits.find_first_not_of("0123456789_") == std::string::npos;
}

std::optional<double> number_of(const Json& value, const ValueRow& row) {
  if (value.is_number()) return value.get<double>();
  if (value.is_boolean() && !row.strict) return value.get<bool>() ? 1.0 : 0.0;
  if (!value.is_string() || row.type == kCount || row.type == kReal) return std::nullopt;
  const std::string text = value.get<std::string>();
  if (row.type == kWhole && !is_whole_text(text, row.strict)) return std::nullopt;
  return number_in(text);
}

std::optional<Json> whole_of(const Json& value, const ValueRow& row) {
  const std::optional<double> number = number_of(value, row);
  if (!number || *number < row.low || *number > row.high) return std::nullopt;
  if (*number != std::floor(*number) || std::abs(*number) > 0x1p63) return std::nullopt;
  if (value.is_number_integer()) return value;  // exact above 2^53
  if (*number >= 0x1p63) return Json(std::numeric_limits<int64_t>::max());
  return Json(static_cast<int64_t>(*number));
}

std::optional<Json> flag_of(const Json& value, bool text_too) {
  if (value.is_boolean()) return value;
  if (value == 0 || value == 1) return Json(value == 1);
  if (!value.is_string() || !text_too) return std::nullopt;
  const std::string text = lower(value.get<std::string>());
  for (const char* yes : {"1", "true", "t", "yes", "y", "on"}) {
    if (text == yes) return Json(true);
  }
  for (const char* no : {"0", "false", "f", "no", "n", "off"}) {
    if (text == no) return Json(false);
  }
  return std::nullopt;
}

std::vector<std::string> choices_of(const ValueRow& row) {
  std::vector<std::string> names;
  std::string_view rest = row.choices;
  while (!rest.empty()) {
    const size_t blank = std::min(rest.find(' '), rest.size());
    names.emplace_back(rest.substr(0, blank));
    rest.remove_prefix(std::min(blank + 1, rest.size()));
  }
  return names;
}

std::optional<Json> chosen(const Json& value, const ValueRow& row) {
  if (!value.is_string()) return std::nullopt;
  const std::string given = value.get<std::string>();
  const std::string text = row.type == kChoice ? lower(given) : given;
  const std::vector<std::string> names = choices_of(row);
  if (std::find(names.begin(), names.end(), text) == names.end()) return std::nullopt;
  return Json(text);
}

std::optional<Json> texts_of(const Json& value) {
  if (value.is_string()) return Json::array({value});
  const bool all = value.is_array() && std::all_of(value.begin(), value.end(),
                                                   [](const Json& one) { return one.is_string(); });
  return all ? std::optional<Json>(value) : std::nullopt;
}

// Returns the value with the type of its row, or nothing if DeepSpeed would fail.
std::optional<Json> converted(const Json& value, const ValueRow& row) {
  switch (row.type) {
    case kModel:
    case kSection:
      return value.is_object() ? std::optional<Json>(value) : std::nullopt;
    case kFlag:
      return flag_of(value, true);
    case kTruth:
      return flag_of(value, false);
    case kWhole:
    case kCount:
      return whole_of(value, row);
    case kNumber:
    case kReal: {
      const std::optional<double> number = number_of(value, row);
      if (!number || !(*number >= row.low && *number <= row.high)) return std::nullopt;
      return value.is_number() ? value : Json(*number);
    }
    case kText:
      return value.is_string() ? std::optional<Json>(value) : std::nullopt;
    case kTexts:
      return texts_of(value);
    case kList:
      return value.is_array() ? std::optional<Json>(value) : std::nullopt;
    case kChoice:
    case kExact:
      return chosen(value, row);
    case kObject:
      return value;
  }
  return std::nullopt;
}

std::string range_of(const ValueRow& row) {
  const bool low = row.low != -kAny, high = row.high != kAny && row.high <= 1e300;
  if (low && high) return concat(" from ", row.low, " to ", row.high);
  return low ? concat(" of at least ", row.low) : "";
}

std::string allowed(const ValueRow& row) {
  if (*row.choices != '\0') return concat("\"", join(choices_of(row), "\", \""), "\"");
  switch (row.type) {
    case kModel:
    case kSection:
      return "a section {key: value}; or leave it out";
    case kFlag:
    case kTruth:
      return "true or false";
    case kWhole:
    case kCount:
      return concat("a whole number", range_of(row));
    case kNumber:
    case kReal:
      return concat("a number", range_of(row));
    case kTexts:
      return "a list of strings";
    case kList:
      return "a list";
    default:
      return "text";
  }
}

// ---- all values

class ValueReader {
 public:
  explicit ValueReader(DeepSpeedValues* out) : out_(*out) {}

  Json section(const Json& given, const std::string& path, bool model) {
    Json read = Json::object();
    const std::string prefix = path.empty() ? "" : path + ".";
    for (const auto& [name, value] : given.items()) {
      const std::string known = documented(prefix, name);
      const auto same = given.find(known);
      if (known != name && value != "auto" && same != given.end() && *same != "auto")
        fail_deepspeed(concat("\"", prefix, name, "\" and \"", prefix, known,
                              "\" are the same key: keep only \"", prefix, known, "\""));
      // In a dict, a key with a dot is only one name, which DeepSpeed does not read.
      const bool dotted = name.find('.') != std::string::npos;
      const ValueRow* row = dotted ? nullptr : row_of(prefix + known);
      if (row == nullptr && model && value != "auto") fail_unknown(prefix, name);
      if (value == "auto" && (model || is_number_of_dict(prefix + name, row))) {
        (model ? out_.auto_keys : out_.left_over).push_back(prefix + name);
      } else if (row == nullptr) {
        read[name] = value;
      } else if (!(value.is_null() && row->null)) {
        read[known] = one(value, *row);
      }
    }
    return read;
  }

 private:
  static std::string documented(const std::string& prefix, const std::string& name) {
    for (const auto& [other, known] : kOtherNames) {
      if (prefix + name == other) return known;
    }
    return name;
  }

  // Frameworks replace "auto" here. If "auto" remains, DeepSpeed's arithmetic fails.
  static bool is_number_of_dict(const std::string& key, const ValueRow* row) {
    return (row != nullptr && (row->type == kCount || row->type == kReal)) ||
           key.starts_with("optimizer.params.") || key.starts_with("scheduler.params.");
  }

  [[noreturn]] static void fail_unknown(const std::string& prefix, const std::string& name) {
    std::vector<std::string> names;
    for (const ValueRow& row : kRows) {
      const std::string key = row.key;
      if (key.starts_with(prefix) && key.find('.', prefix.size()) == std::string::npos)
        names.push_back(key.substr(prefix.size()));
    }
    fail_deepspeed(
        concat("unknown key \"", prefix, name, "\"", config_text::suggestion(prefix, name, names)));
  }

  // Scripts match the words "Invalid KEY" and "must be a number" of DeepSpeed's errors.
  [[noreturn]] static void fail_value(const Json& value, const ValueRow& row) {
    const bool number = row.type == kNumber || row.type == kReal;
    fail_deepspeed(concat(row.type == kChoice ? concat("Invalid ", row.key, ": ") : "", "\"",
                          row.key, "\" is ", value.dump(),
                          number ? "; it must be " : "; allowed: ", allowed(row)));
  }

  Json one(const Json& value, const ValueRow& row) {
    const std::optional<Json> read = converted(value, row);
    if (!read) fail_value(value, row);
    if (row.type != kModel && row.type != kSection) return *read;
    return section(*read, row.key, row.type == kModel);
  }

  DeepSpeedValues& out_;
};

}  // namespace
}  // namespace deepspeed_values

void fail_deepspeed(const std::string& message) {
  throw ConfigError("[plan::deepspeed_config] " + message);
}

DeepSpeedValues read_deepspeed_values(const nlohmann::ordered_json& config) {
  DeepSpeedValues values;
  values.config = deepspeed_values::ValueReader(&values).section(config, "", false);
  return values;
}

}  // namespace penstock
