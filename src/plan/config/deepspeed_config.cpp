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

namespace penstock {

namespace {

using Json = nlohmann::ordered_json;

constexpr KeyFate kTaken = KeyFate::kTaken, kNoEffect = KeyFate::kNoEffect,
                  kRefused = KeyFate::kRefused;

constexpr const char* kBuckets = "gradients and parameters move unit by unit";
constexpr const char* kUnits = "a unit is gathered and released as a whole";
constexpr const char* kDisk = "the disk tier chooses its requests itself";
constexpr const char* kPinned = "the engine pins the memory that it needs";
constexpr const char* kLogs = "Penstock has no such output";
constexpr const char* kInnermost = "tensor ranks are neighbours, and the engine makes their groups";
constexpr const char* kPreset = "the model's own rules (parallel.rules) apply after layer_specs";
constexpr const char* kHead = "specs or rules set how embeddings and the head are cut";
constexpr const char* kMonitors = "rank 0 writes DeepSpeed's events (from Python)";
constexpr const char* kLater = "not supported yet";

// Rows of single keys come before the ".*" row of their section, because the first match applies.
constexpr DeepSpeedKey kKeys[] = {
    {"train_batch_size", kTaken, "batch.global"},
    {"train_micro_batch_size_per_gpu", kTaken, "batch.micro"},
    {"gradient_accumulation_steps", kTaken, "batch.accumulate"},
    {"gradient_clipping", kTaken, "clip; 1.0 if it is missing, as in DeepSpeed"},
    {"steps_per_print", kNoEffect, kLogs},
    {"wall_clock_breakdown", kNoEffect, kLogs},
    {"memory_breakdown", kNoEffect, kLogs},
    {"dump_state", kNoEffect, kLogs},
    {"log_level", kNoEffect, kLogs},
    {"timers.*", kNoEffect, kLogs},
    {"prescale_gradients", kNoEffect, "sums are accurate to fp32 in either order"},
    {"gradient_predivide_factor", kNoEffect, "sums are accurate to fp32 in either order"},
    {"gradient_allreduce_op", kRefused, "gradients are averaged"},
    {"communication_data_type", kNoEffect, "gradients are sent in the dtype of their table cell"},
    {"seq_parallel_communication_data_type", kNoEffect,
     "gradients are sent in the dtype of their table cell"},
    {"disable_allgather", kNoEffect, kBuckets},
    {"sparse_gradients", kRefused, kLater},
    {"managed_gradient_accumulation", kRefused, kLater},
    {"zero_allow_untested_optimizer", kNoEffect, "every elementwise optimizer is allowed"},
    {"zero_force_ds_cpu_optimizer", kNoEffect, "Penstock's kernels update where the state rests"},
    {"dataloader_drop_last", kNoEffect, "data is loaded by the script"},
    {"disable_python_gc", kNoEffect, "garbage collection is never forced"},
    {"vocabulary_size", kNoEffect, kLogs},
    {"graph_harvesting", kNoEffect, "no graph is captured"},
    {"keep_in_fp32_modules", kRefused, "use the native key \"dtypes\""},
    {"use_data_before_expert_parallelism", kNoEffect, "there is no expert parallelism"},
    {"sequence_parallel_size", kTaken, "mesh.sequence; 0 and 1: off"},
    {"data_parallel_size", kNoEffect, "it follows from the number of ranks"},
    {"optimizer.type", kTaken, "optimizer.type; Adam decays as AdamW unless adam_w_mode is false"},
    {"optimizer.params.lr", kTaken, "optimizer.lr"},
    {"optimizer.params.betas", kTaken, "optimizer.betas"},
    {"optimizer.params.eps", kTaken, "optimizer.eps"},
    {"optimizer.params.weight_decay", kTaken, "optimizer.weight_decay"},
    {"optimizer.params.momentum", kTaken, "optimizer.momentum"},
    {"optimizer.params.dampening", kTaken, "optimizer.dampening"},
    {"optimizer.params.nesterov", kTaken, "optimizer.nesterov"},
    {"optimizer.params.lr_decay", kTaken, "optimizer.lr_decay"},
    {"optimizer.params.adam_w_mode", kTaken, "optimizer.type"},
    {"optimizer.params.torch_adam", kTaken, "one kernel does both; AdamW then decays by 0.01"},
    {"optimizer.params.fp32_optimizer_states", kTaken, "optimizer.moments_dtype"},
    {"optimizer.params.bias_correction", kRefused, "moments are always corrected for their bias"},
    {"optimizer.params.amsgrad", kRefused, kLater},
    {"optimizer.params.freeze_step", kRefused, kLater},
    {"optimizer.params.max_grad_norm", kRefused, "use gradient_clipping"},
    {"optimizer.params.cuda_aware", kNoEffect, "there is no MPI"},
    {"optimizer.params.comm_backend_name", kNoEffect, "all exchanges use torch's process groups"},
    {"optimizer.legacy_fusion", kNoEffect, "one kernel does both"},
    {"scheduler.*", kTaken, "a schedule of penstock.schedules, or of torch.optim.lr_scheduler"},
    {"bf16.enabled", kTaken, "precision"},
    {"bf16.immediate_grad_update", kNoEffect, "gradients are summed as soon as they exist"},
    {"bf16.check_grad_overflow", kNoEffect, "a norm that is not finite is always detected"},
    {"bf16.bf16_master_weights_and_grads", kRefused, "masters are fp32"},
    {"bf16.bf16_optimizer_states", kTaken, "optimizer.moments_dtype"},
    {"fp16.enabled", kTaken, "precision"},
    {"fp16.auto_cast", kNoEffect, "inputs stay as they are"},
    {"fp16.loss_scale", kTaken, "loss_scale.initial and window 0; 0: dynamic"},
    {"fp16.initial_scale_power", kTaken, "loss_scale.initial"},
    {"fp16.loss_scale_window", kTaken, "loss_scale.window"},
    {"fp16.min_loss_scale", kTaken, "loss_scale.min"},
    {"fp16.hysteresis", kNoEffect, "the scale is halved at each overflow"},
    {"fp16.consecutive_hysteresis", kNoEffect, "the scale is halved at each overflow"},
    {"fp16.fp16_master_weights_and_grads", kRefused, "masters are fp32"},
    {"torch_autocast.*", kRefused, "use torch.autocast in the script"},
    {"amp.*", kRefused, "use bf16 or fp16"},
    {"data_types.grad_accum_dtype", kRefused, "set the native cell table.grad.hold"},
    {"data_types.param_dtype", kRefused, "use bf16 or fp16"},
    {"data_types.buffer_dtype", kRefused, kLater},
    {"zero_optimization.stage", kTaken, "strategy: ddp, zero1, zero2, zero3"},
    {"zero_optimization.zero_hpz_partition_size", kTaken, "strategy hpz, mesh.node"},
    {"zero_optimization.mics_shard_size", kTaken, "strategy mics, mesh.node"},
    {"zero_optimization.mics_hierarchical_params_gather", kNoEffect, kUnits},
    {"zero_optimization.offload_param.device", kTaken, "offload.params"},
    {"zero_optimization.offload_param.nvme_path", kTaken, "offload.path"},
    {"zero_optimization.offload_param.pin_memory", kNoEffect, kPinned},
    {"zero_optimization.offload_param.*", kNoEffect, kDisk},
    {"zero_optimization.offload_optimizer.device", kTaken, "offload.optimizer"},
    {"zero_optimization.offload_optimizer.nvme_path", kTaken, "offload.path"},
    {"zero_optimization.offload_optimizer.pin_memory", kNoEffect, kPinned},
    {"zero_optimization.offload_optimizer.ratio", kNoEffect, "the whole state is offloaded"},
    {"zero_optimization.offload_optimizer.*", kNoEffect, kDisk},
    {"zero_optimization.cpu_offload", kTaken, "offload.optimizer"},
    {"zero_optimization.cpu_offload_params", kTaken, "offload.params"},
    {"zero_optimization.cpu_offload_use_pin_memory", kNoEffect, kPinned},
    {"zero_optimization.stage3_prefetch_bucket_size", kTaken, "prefetch_bytes"},
    {"zero_optimization.stage3_param_persistence_threshold", kNoEffect, kUnits},
    {"zero_optimization.stage3_model_persistence_threshold", kNoEffect, kUnits},
    {"zero_optimization.stage3_max_live_parameters", kNoEffect, kUnits},
    {"zero_optimization.stage3_max_reuse_distance", kNoEffect, kUnits},
    {"zero_optimization.stage3_module_granularity_threshold", kNoEffect, kUnits},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", kNoEffect,
     "state_dict() always gathers"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save", kNoEffect,
     "state_dict() always gathers"},
    {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kNoEffect, kBuckets},
    {"zero_optimization.stage3_allgather_sequential", kNoEffect, kBuckets},
    {"zero_optimization.reduce_bucket_size", kNoEffect, kBuckets},
    {"zero_optimization.allgather_bucket_size", kNoEffect, kBuckets},
    {"zero_optimization.reduce_scatter", kNoEffect, kBuckets},
    {"zero_optimization.allgather_partitions", kNoEffect, kBuckets},
    {"zero_optimization.contiguous_gradients", kNoEffect, kBuckets},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kNoEffect, kBuckets},
    {"zero_optimization.overlap_comm", kNoEffect, "exchanges always overlap"},
    {"zero_optimization.round_robin_gradients", kNoEffect, kBuckets},
    {"zero_optimization.parameter_alignment", kNoEffect, kBuckets},
    {"zero_optimization.compute_grad_norm", kNoEffect, "the norm needs no separate pass"},
    {"zero_optimization.sub_group_size", kNoEffect, "chunks follow from offload.window_bytes"},
    {"zero_optimization.load_from_fp32_weights", kNoEffect, "checkpoints hold fp32 weights"},
    {"zero_optimization.elastic_checkpoint", kNoEffect,
     "every checkpoint loads with any number of ranks"},
    {"zero_optimization.pipeline_loading_checkpoint", kNoEffect, "each rank reads only its shards"},
    {"zero_optimization.ignore_unused_parameters", kNoEffect, "unused parameters are detected"},
    {"zero_optimization.legacy_stage1", kRefused, "DeepSpeed refuses it, too"},
    {"zero_optimization.zero_quantized_weights", kRefused, kLater},
    {"zero_optimization.zero_quantized_nontrainable_weights", kRefused, kLater},
    {"zero_optimization.zero_quantized_gradients", kRefused, kLater},
    {"zero_optimization.zeropp_loco_param.*", kRefused, kLater},
    {"zero_optimization.zenflow.*", kRefused, kLater},
    {"zero_optimization.memory_efficient_linear", kNoEffect, kUnits},
    {"zero_optimization.override_module_apply", kNoEffect,
     "Penstock replaces no function of torch"},
    {"zero_optimization.log_trace_cache_warnings", kNoEffect, kLogs},
    {"zero_optimization.enable_sanity_checks", kNoEffect, "they are always on"},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kNoEffect, "there is no Muon"},
    {"zero_optimization.leaf_module.*", kNoEffect, "blocks with experts are units automatically"},
    {"aio.*", kNoEffect, kDisk},
    {"activation_checkpointing.*", kNoEffect, "it acts where the script calls checkpoint()"},
    {"checkpoint.*", kNoEffect, "checkpoints are atomic, and load under any layout"},
    {"flops_profiler.*", kNoEffect, kLogs},
    {"comms_logger.*", kNoEffect, kLogs},
    {"tensorboard.enabled", kTaken, kMonitors},
    {"tensorboard.output_path", kTaken, kMonitors},
    {"tensorboard.job_name", kTaken, kMonitors},
    {"csv_monitor.enabled", kTaken, kMonitors},
    {"csv_monitor.output_path", kTaken, kMonitors},
    {"csv_monitor.job_name", kTaken, kMonitors},
    {"wandb.enabled", kTaken, kMonitors},
    {"wandb.group", kTaken, kMonitors},
    {"wandb.team", kTaken, kMonitors},
    {"wandb.project", kTaken, kMonitors},
    {"comet.enabled", kTaken, kMonitors},
    {"comet.samples_log_interval", kTaken, kMonitors},
    {"comet.project", kTaken, kMonitors},
    {"comet.workspace", kTaken, kMonitors},
    {"comet.api_key", kTaken, kMonitors},
    {"comet.experiment_name", kTaken, kMonitors},
    {"comet.experiment_key", kTaken, kMonitors},
    {"comet.online", kTaken, kMonitors},
    {"comet.mode", kTaken, kMonitors},
    {"nebula.*", kNoEffect, "checkpoints are written in the background by save(wait=False)"},
    {"datastates_ckpt.*", kNoEffect,
     "checkpoints are written in the background by save(wait=False)"},
    {"autotuning.*", kNoEffect, "\"penstock plan\" compares strategies and tiers"},
    {"elasticity.*", kRefused, "use penstock run --nnodes MIN:MAX"},
    {"pipeline.*", kRefused, "pass it to deepspeed.pipe.PipelineModule"},
    {"tensor_parallel.autotp_size", kTaken, "mesh.tensor; 0 and 1: off"},
    {"tensor_parallel.tp.tp_size", kTaken, "1, or equal to autotp_size"},
    {"tensor_parallel.tp.tp_grain_size", kNoEffect, "layers are cut evenly"},
    {"tensor_parallel.tp.mpu", kRefused, kInnermost},
    {"tensor_parallel.tp.tp_group", kRefused, kInnermost},
    {"tensor_parallel.partition_config.layer_specs", kTaken, "parallel.rules"},
    {"tensor_parallel.partition_config.use_default_specs", kTaken, kPreset},
    {"tensor_parallel.partition_config.strict_mode", kTaken, "a Linear without a spec is an error"},
    {"tensor_parallel.partition_config.tp_size", kNoEffect, "autotp_size sets it"},
    {"tensor_parallel.partition_config.lm_head_patterns", kNoEffect, kHead},
    {"tensor_parallel.partition_config.embedding_partition_dim", kNoEffect, kHead},
    {"tensor_parallel.preset_model", kTaken, kPreset},
    {"tensor_parallel.injection_policy_tuple", kRefused, "use the native key \"parallel.rules\""},
    {"tensor_parallel.vocab_parallel_lm_head", kNoEffect, kHead},
    {"tensor_parallel.vocab_parallel_ce_backend", kNoEffect, kHead},
    {"tensor_parallel.dtype", kNoEffect, "bf16 and fp16 set the precision"},
    {"tensor_parallel.tp_overlap_comm", kNoEffect, "a layer waits for its own exchange"},
    {"tensor_parallel.keep_module_on_host", kNoEffect, "only for inference"},
    {"tensor_parallel.replace_with_kernel_inject", kNoEffect, "only for inference"},
    {"tensor_parallel.kernel_inject", kNoEffect, "only for inference"},
    {"expert_parallel.*", kRefused, kLater},
    {"compile.*", kRefused, kLater},
    {"data_efficiency.*", kRefused, kLater},
    {"curriculum_learning.*", kRefused, kLater},
    {"progressive_layer_drop.*", kRefused, kLater},
    {"eigenvalue.*", kRefused, kLater},
    {"quantize_training.*", kRefused, kLater},
    {"compression_training.*", kRefused, kLater},
    {"weight_quantization.*", kRefused, kLater},
    {"sparse_attention.*", kRefused, kLater},
    {"hybrid_engine.*", kRefused, "engine.generate() works without it"},
};

[[noreturn]] void fail_deepspeed(const std::string& message) {
  throw ConfigError("[plan::deepspeed_config] " + message);
}

Json parse(const std::string& text) {
  try {
    return Json::parse(text, nullptr, true, /*ignore_comments=*/true);
  } catch (const nlohmann::json::exception& error) {
    fail_deepspeed(concat("the config is not valid JSON: ", error.what()));
  }
}

// Returns whether the value of a refused key selects the behaviour that the engine has anyway.
bool is_harmless(const std::string& key, const Json& value) {
  static const std::map<std::string, Json> kUsual = {
      {"optimizer.params.bias_correction", true},
      {"managed_gradient_accumulation", true},
      {"data_types.grad_accum_dtype", "fp32"},
  };
  const auto usual = kUsual.find(key);
  if (usual != kUsual.end())
    return usual->second == value || (usual->second.is_number() && value == 0);
  return value == false || value == 0 || value == "" || value == "none" || value == "mean" ||
         (value.is_structured() && value.empty());
}

const DeepSpeedKey* row_of(const std::string& key) {
  for (const DeepSpeedKey& row : kKeys) {
    const std::string_view name = row.key;
    const bool section = name.ends_with(".*");
    if (section ? key.starts_with(name.substr(0, name.size() - 1)) : key == name) return &row;
  }
  return nullptr;
}

// The config's values by their full keys. Values that are null or still "auto" are left out.
struct Leaves {
  std::vector<std::pair<std::string, Json>> all{};

  void take(const Json& value, const std::string& key) {
    if (value.is_null() || value == "auto") return;
    if (!value.is_object()) return all.emplace_back(key, value), void();
    const auto enabled = value.find("enabled");
    const DeepSpeedKey* row = row_of(key + ".enabled");
    if (row != nullptr && row->fate == kRefused && enabled != value.end() && *enabled == false) {
      return;  // the section is off
    }
    for (const auto& [name, inner] : value.items())
      take(inner, key.empty() ? name : key + "." + name);
  }
  const Json* find(const std::string& key) const {
    for (const auto& [name, value] : all) {
      if (name == key) return &value;
    }
    return nullptr;
  }
  double number(const std::string& key, double otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_number())
      fail_deepspeed(concat("\"", key, "\" is ", value->dump(), "; allowed: a number"));
    return value->get<double>();
  }
  int64_t whole(const std::string& key, int64_t otherwise) const {
    const double found = number(key, static_cast<double>(otherwise));
    if (found != static_cast<double>(static_cast<int64_t>(found)) || found < -1)
      fail_deepspeed(concat("\"", key, "\" is ", find(key)->dump(), "; allowed: a whole number"));
    return static_cast<int64_t>(found);
  }
  bool flag(const std::string& key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean())
      fail_deepspeed(concat("\"", key, "\" is ", value->dump(), "; allowed: true or false"));
    return value->get<bool>();
  }
  std::string text(const std::string& key, const std::string& otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_string())
      fail_deepspeed(concat("\"", key, "\" is ", value->dump(), "; allowed: text"));
    return value->get<std::string>();
  }
};

// ---- what becomes of each key

std::vector<std::string> names_in(const std::string& section) {
  std::vector<std::string> names;
  for (const DeepSpeedKey& row : kKeys) {
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

// ---- the native config

void refuse(const Leaves& given, const std::string& key, const std::string& allowed) {
  fail_deepspeed(concat("\"", key, "\" is ", given.find(key)->dump(), "; allowed: ", allowed));
}

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
  if (stage < 0 || stage > 3) refuse(given, zero + "stage", "0, 1, 2 or 3");
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
}

void take_offload(const Leaves& given, Json& native) {
  const std::string zero = "zero_optimization.";
  Json offload = Json::object();
  const auto take = [&](const std::string& section, const char* old, const char* role) {
    std::string device = given.text(zero + section + ".device", "none");
    if (given.flag(zero + old, false)) device = "cpu";
    if (device == "none") return;
    if (device != "cpu" && device != "nvme")
      refuse(given, zero + section + ".device", "\"none\", \"cpu\" or \"nvme\"");
    offload[role] = device == "cpu" ? "host" : "disk";
    if (device == "cpu") return;
    const std::string path = given.text(zero + section + ".nvme_path", "");
    if (path.empty())
      fail_deepspeed(concat("\"", zero, section, "\" has device \"nvme\" and no nvme_path"));
    if (offload.contains("path") && offload["path"] != path)
      fail_deepspeed(concat("\"", zero, section, ".nvme_path\" is \"", path,
                            "\"; optimizer and parameters share one folder, ",
                            offload["path"].dump()));
    offload["path"] = path;
  };
  take("offload_optimizer", "cpu_offload", "optimizer");
  take("offload_param", "cpu_offload_params", "params");
  if (!offload.empty()) native["offload"] = offload;
}

void take_precision(const Leaves& given, Json& native) {
  const bool bf16 = given.flag("bf16.enabled", false), fp16 = given.flag("fp16.enabled", false);
  if (bf16 && fp16) fail_deepspeed("\"bf16.enabled\" and \"fp16.enabled\" are both true");
  if (bf16 || fp16)
    native["precision"] = bf16 ? "bf16" : "fp16";  // otherwise the model's own dtypes
  if (!fp16) return;
  const double fixed = given.number("fp16.loss_scale", 0.0);
  const int64_t power = given.whole("fp16.initial_scale_power", 16);
  if (power < 0 || power > 40) refuse(given, "fp16.initial_scale_power", "0 to 40");
  const double initial = fixed > 0 ? fixed : static_cast<double>(int64_t{1} << power);
  native["loss_scale"] = {
      {"initial", initial},
      {"window", fixed > 0 ? 0 : given.whole("fp16.loss_scale_window", 1000)},
      {"min", std::min(initial, std::max(1.0, given.number("fp16.min_loss_scale", 1.0)))}};
}

// DeepSpeed's names of optimizers, with the native names and DeepSpeed's defaults.
struct KeyKind {
  const char* name;
  const char* native;
  Json defaults;
};

void take_optimizer(const Leaves& given, Json& native) {
  static const KeyKind kKinds[] = {
      {"adam", "AdamW", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
      {"adamw", "AdamW", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
      {"lion", "Lion", {{"lr", 1e-3}, {"betas", {0.9, 0.999}}, {"weight_decay", 0.0}}},
      {"adagrad", "Adagrad", {{"lr", 1e-2}, {"eps", 1e-10}, {"weight_decay", 0.0}}},
      {"sgd", "SGD", {{"lr", 1e-3}, {"weight_decay", 0.0}}},
  };
  const bool low = given.flag("bf16.bf16_optimizer_states", false) ||
                   !given.flag("optimizer.params.fp32_optimizer_states", true);
  if (given.find("optimizer.type") == nullptr) {
    if (low)
      native["optimizer"] = {{"moments_dtype", "bf16"}};  // for an optimizer object of the user
    return;
  }
  std::string type = given.text("optimizer.type", "");
  std::transform(type.begin(), type.end(), type.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto* const kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                        [&](const KeyKind& one) { return type == one.name; });
  if (kind == std::end(kKinds))
    refuse(given, "optimizer.type",
           "\"Adam\", \"AdamW\", \"Lion\", \"Adagrad\", \"SGD\"; or pass a torch optimizer");
  Json optimizer = {{"type", kind->native}};
  optimizer.update(kind->defaults);
  if (type == "adamw" && given.flag("optimizer.params.torch_adam", false)) {
    optimizer["weight_decay"] = 0.01;  // the default of torch.optim.AdamW
  }
  for (const char* key :
       {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay"}) {
    const Json* value = given.find(concat("optimizer.params.", key));
    if (value != nullptr) optimizer[key] = *value;
  }
  if (type == "adam" && !given.flag("optimizer.params.adam_w_mode", true))
    optimizer["type"] = "Adam";
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
  take_strategy(given, data, native);
  take_offload(given, native);
  take_precision(given, native);
  take_optimizer(given, native);
  take_batch(given, data / sequence, native);
  native["clip"] = given.number("gradient_clipping", 1.0);
  native["nonfinite"] = "skip";
  const int64_t ahead = given.whole("zero_optimization.stage3_prefetch_bucket_size", 0);
  if (ahead > 0) native["prefetch_bytes"] = ahead * (native.contains("precision") ? 2 : 4);
  return native;
}

// Native keys that DeepSpeed does not have.
constexpr std::array kOurs = {"strategy", "table",      "mesh",     "precision", "dtypes",
                              "offload",  "memory",     "batch",    "schedule",  "activations",
                              "clip",     "units",      "seed",     "tiling",    "prefetch_bytes",
                              "comm",     "loss_scale", "nonfinite"};

Json renamed(Json config) {
  if (config.contains("bfloat16")) {
    if (!config.contains("bf16")) config["bf16"] = config["bfloat16"];
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

std::span<const DeepSpeedKey> deepspeed_keys() { return kKeys; }

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

TranslatedConfig translate_deepspeed_config(const std::string& json_text, int world) {
  const Json config = renamed(parse(json_text));
  if (!config.is_object()) fail_deepspeed("the config is not a JSON object");
  for (const char* key : kOurs) {
    if (config.contains(key))
      fail_deepspeed(
          concat("\"", key, "\" is a native key of Penstock: write the config in one dialect"));
  }
  Leaves leaves;
  leaves.take(config, "");
  TranslatedConfig translated;
  for (const auto& [key, value] : leaves.all) translated.given.push_back(look_up(key, value));
  translated.native = native_of(leaves, world).dump();
  for (GivenKey& key : translated.given) {
    const bool groups =
        key.key.ends_with("zero_hpz_partition_size") || key.key.ends_with("mics_shard_size");
    if (groups && leaves.whole("zero_optimization.stage", 0) < 3) {
      key.fate = kNoEffect;
      key.note = "parameters are not sharded below stage 3";
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
  const Json none;
  const Json& scheduler = config.contains("scheduler") ? config["scheduler"] : none;
  if (scheduler.is_object() && !scheduler.value("type", none).is_null())
    translated.scheduler = scheduler.dump();
  return translated;
}

}  // namespace penstock
