#pragma once
// Config: all settings of a run, in the native dialect. A plain value, usable from any thread.
// docs/config.md documents every key. An unknown or ineffective key throws ConfigError, which names
// the nearest valid key.
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/export.h"

namespace penstock {

enum class OptimizerType : uint8_t { kAdamW, kAdam, kSgd, kAdagrad, kLion };
inline constexpr int kNumOptimizerTypes = 5;

// The initial values are AdamW's defaults. Config::parse sets the defaults of the other types
// (optimizer_kinds.h).
struct OptimizerConfig {
  OptimizerType type = OptimizerType::kAdamW;
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0.01;
  double momentum = 0.0, dampening = 0.0, lr_decay = 0.0;  // SGD; lr_decay: Adagrad
  bool nesterov = false;
  std::string layout = "flat";         // "flat" "whole": no shard has a part of a parameter
  std::string moments_dtype = "fp32";  // "fp32" "bf16"; of the stored moments; not for Adagrad
};

// Dynamic loss scaling, for parameters that compute in fp16 (arXiv:1710.03740).
struct LossScaleConfig {
  double initial = 65536.0;
  int64_t window = 2000;   // good steps in a row before the scale doubles; 0 = it never changes
  double min = 1.0;        // at this scale, `nonfinite` decides what an overflow does
  int64_t settle = 0;      // good steps that do not count, at the start and after an overflow
  int64_t hysteresis = 1;  // n: the n-th overflow, and each later one, halves the scale
  std::string refill = "growth";  // "growth" "step": what resets the count of overflows
  bool operator==(const LossScaleConfig&) const = default;
};

struct ScheduleConfig {
  std::string type = "none";  // "none" "constant" "linear" "cosine"
  int64_t warmup_steps = 0;   // lr rises linearly over these steps; step 1 uses lr / warmup_steps
  int64_t total_steps = 0;    // last step of the decay; must be above 0 for "linear" and "cosine"
  double min_ratio = 0.0;     // final lr / peak lr
};

struct BatchConfig {
  int64_t micro = 0;       // samples per rank and backward; 0 = not given
  int64_t accumulate = 1;  // backwards per step
  int64_t global = 0;      // samples per step over all ranks = micro * accumulate * data ranks
  std::string reduction = "mean";  // "mean" "sum" over a window's backwards; over ranks the mean
};

struct CommConfig {
  std::string backend = "auto", codec = "none";
  int64_t exact_first = 0, exact_every = 0;  // steps with plain wires: the first n, every n-th
  // Outer steps of the codec "local": steps between them, learning rate, momentum, wire.
  int64_t outer_every = 32;
  double outer_lr = 0.7, outer_momentum = 0.9;
  std::string outer_wire = "int4/128";
  // The dtype of sums of low-precision gradients: "gradient" (their own), "fp32" or "auto".
  std::string reduce_dtype = "auto";
  int64_t bucket_bytes = 1 << 20;  // neighbouring moves smaller than this share one collective
  double timeout_s = 600.0;        // limit of every wait for a peer
  double warn_s = 30.0;            // a longer wait prints a line on stderr; 0 = never
  std::string report_dir;          // folder for reports of a lost peer; empty = no report
};

struct UnitsConfig {
  std::vector<std::string> modules;  // class names of unit modules; empty = found automatically
  int64_t max_bytes = 256LL << 20;   // largest unit of a model without repeated blocks
  int64_t layer_bytes = 1LL << 20;   // size from which a layer outside the blocks is a unit
};

// Large Linear and Embedding weights, split into tiles of rows; each tile is a unit.
struct TilingConfig {
  int64_t max_bytes = 0;  // size limit of a tile in its compute dtype; 0 = nothing is split
  std::vector<std::string> modules;  // names or patterns of modules that may be split; empty = all
  int64_t loss_tokens = 0;           // tokens per part of the cross-entropy; 0 = off
  std::string head;  // module whose output is the logits; empty = found automatically
  bool any() const { return max_bytes > 0 || loss_tokens > 0; }
};

struct OffloadConfig {
  std::string optimizer = "none", params = "none";   // "none" "host" "disk", "auto" until chosen
  std::string activations = "none", cache = "none";  // "none" "host" "disk"
  std::string gradients = "none";                    // "none" (where the update runs) "host" "disk"
  std::string path;
  int64_t window_bytes = 192LL << 20;  // host memory for streaming optimizer state that is on disk
  int64_t keep_bytes = 0;    // of parameters that stay whole between forwards, for inference
  bool late_update = false;  // step() returns after the norm; units are updated before use
  bool checksums = false;    // checks that data read from disk equals the data written
  double timeout_s = 60.0;   // longest wait for the disk without a completed request
};

// Budgets in bytes per rank; -1 = the free memory that the engine finds. On the CPU, the device
// tier is host memory, counted separately; without a budget of its own it shares the host's.
struct MemoryConfig {
  int64_t device_bytes = -1, host_bytes = -1;
};

struct CheckpointConfig {
  std::string path;  // folder of the run's checkpoints, for save() and load() without a path
  int keep = 0;      // number of newest checkpoints to keep; 0 = all
  std::vector<std::string> signals;  // step() saves after one: "SIGTERM" "SIGUSR1" "SIGUSR2"
};

// What a run records about itself (docs/monitoring.md).
struct MonitorConfig {
  std::string path;  // folder, made if missing; empty = nothing is written
  std::vector<std::string> formats = {"jsonl"};  // "jsonl" "csv" "tensorboard" "wandb"
  int64_t every = 1;                             // steps between two rows
  std::string console = "none";                  // "none" "lines" "bar" "auto"
  int64_t events = 8192;    // number of timeline events to keep; 0 = nothing is recorded
  int64_t trace_first = 0;  // first step of a trace; 0 = none
  int64_t trace_steps = 1;  // number of steps in the trace
  std::string machine;  // file written by `penstock bench`, used to predict seconds; empty = none
};

// Frozen parameters and cached tokens that rest as small integers ([Note: Quantized parameters]).
struct QuantizeConfig {
  std::string dtype = "none", cache = "none";  // "none" "int8" "int4"
  std::vector<std::string> params;  // name patterns (glob); empty = the matrices of the blocks
};

struct ActivationsConfig {
  int64_t checkpoint = 0;  // k: recomputes every k-th unit in backward; 0 = none
};

struct MeshConfig {
  int data = 0;  // 0 = world size divided by the other axes
  int tensor = 1, pipeline = 1, sequence = 1, expert = 1;
  int node = 1;  // number of nodes over which `data` is split (hpZ, MiCS)
};

// How ranks compute a model together (docs/parallel.md).
struct ParallelConfig {
  // Name pattern (glob) of modules or parameters -> style ("column" ...); the first match applies.
  std::vector<std::pair<std::string, std::string>> rules;
  // First module of each pipeline stage, except stage 0; empty = found automatically.
  std::vector<std::string> stages;
  std::string schedule = "1f1b";   // the names are in src/plan/pipeline_schedule.h
  int virtual_stages = 1;          // stages per rank; above 1 only with "gpipe" or "interleaved"
  bool cut_logits = false;         // true: gathers logits of a "vocab" head only when they are read
  std::string norms = "whole";     // "tokens": between layers, each rank has a part of the tokens
  std::string sequence = "heads";  // attention of sequence ranks: "heads", "ring" or "both"
  // Rules that the first training forward checks against uncut modules: "own" (rules of the
  // config), "all" (also rules that come with the model) or "off".
  std::string verify = "own";
};

struct PENSTOCK_API Config {
  std::string strategy = "zero3";                                   // a preset of src/plan/table.h
  std::map<std::string, std::map<std::string, std::string>> table;  // role -> phase -> placement
  MeshConfig mesh;
  ParallelConfig parallel;
  std::optional<std::string> precision;  // "fp32" "bf16" "fp16"; absent = the model's own dtypes
  std::vector<std::pair<std::string, std::string>> dtypes;  // name pattern (glob) -> dtype
  OffloadConfig offload;
  MemoryConfig memory;
  QuantizeConfig quantize;
  ActivationsConfig activations;
  CheckpointConfig checkpoint;
  MonitorConfig monitor;
  std::optional<OptimizerConfig> optimizer;
  ScheduleConfig schedule;
  BatchConfig batch;
  LossScaleConfig loss_scale;
  double clip = 0.0;                // largest global gradient norm; 0 = off
  std::string nonfinite = "error";  // "error" "skip": what a step does if a gradient is not finite
  UnitsConfig units;
  TilingConfig tiling;
  int64_t prefetch_bytes = 64LL << 20;
  CommConfig comm;
  int64_t seed = -1;
  bool inference = false;  // only forwards: parameters are frozen while the engine is open

  // Parses JSON text in the native dialect. Throws ConfigError.
  static Config parse(const std::string& json_text);
  // Returns canonical JSON with every value: on one line, or indented by `indent` spaces.
  std::string json(int indent = -1) const;
  // Returns the same values as lines such as "config /optimizer/lr = 0.001", which ranks compare.
  // Leaves out all paths, because they may differ between machines.
  std::string lines() const;
  // Checks the settings that depend on the number of ranks, and computes the settings that follow
  // from it (mesh.data, batch). Throws ConfigError with key, value and an allowed value.
  void resolve(int world_size);
};

// Factor of the optimizer's lr for update number `step` (from 1). During warm-up it rises linearly
// from 1 / warmup_steps to 1 at step warmup_steps. Afterwards "constant" stays at 1; "linear" and
// "cosine" (arXiv:1608.03983, no restarts) fall to min_ratio at total_steps and stay there.
PENSTOCK_API double lr_factor(const ScheduleConfig& schedule, int64_t step);

}  // namespace penstock
