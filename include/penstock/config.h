#pragma once
// Config: everything a run may set, in the native dialect. A pure value; any thread.
// Every key is documented in docs/config.md; an unknown or ineffective key is a ConfigError that
// names the nearest valid one.
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

// As it stands: AdamW with its defaults. The other types have defaults of their own
// (optimizer_kinds.h), which Config::parse fills in.
struct OptimizerConfig {
  OptimizerType type = OptimizerType::kAdamW;
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0.01;
  double momentum = 0.0, dampening = 0.0;  // SGD
  double lr_decay = 0.0;                   // Adagrad
  bool nesterov = false;
  std::string moments_dtype = "fp32";  // "fp32" "bf16"; what they are stored in, not for Adagrad
};

// Dynamic loss scaling, for parameters that compute in fp16 (arXiv:1710.03740).
struct LossScaleConfig {
  double initial = 65536.0;
  int64_t window = 2000;  // good steps in a row after which it doubles; 0 = it never changes
  double min = 1.0;       // overflow at this scale is an error
};

struct ScheduleConfig {
  std::string type = "none";  // "none" "constant" "linear" "cosine"
  int64_t warmup_steps = 0;   // lr rises linearly over them; step 1 runs at lr / warmup_steps
  int64_t total_steps = 0;    // end of the decay (linear, cosine); 0 is an error for those
  double min_ratio = 0.0;     // final lr / peak lr
};

struct BatchConfig {
  int64_t micro = 0;       // samples per rank and backward; 0 = not told
  int64_t accumulate = 1;  // backwards per step
  int64_t global = 0;      // samples per step over all ranks = micro * accumulate * data ranks
  std::string reduction = "mean";  // "mean" "sum": of a window's backwards; of ranks always "mean"
};

struct CommConfig {
  std::string backend = "auto";
  std::string codec = "none";
  std::string reduce_dtype = "auto";  // of gradients of low precision while they are summed:
                                      // "gradient" (their own) "fp32"; resolved before a plan
  int64_t bucket_bytes = 1 << 20;     // neighbouring moves below it share one collective
  double timeout_s = 600.0;           // every wait on a peer
  double warn_s = 30.0;               // a longer one is a line on stderr; 0 = never
  std::string report_dir;  // where an error of a lost peer leaves a report; empty = nowhere
};

struct UnitsConfig {
  std::vector<std::string> modules;  // class names that are units; empty = found by itself
  int64_t max_bytes = 256LL << 20;   // for modules without repeated blocks
  int64_t layer_bytes = 1LL << 20;   // of a layer outside of them that is a unit, too
};

// Large Linear and Embedding weights in tiles of rows, each a unit of its own.
struct TilingConfig {
  int64_t max_bytes = 0;             // of a tile, in the dtype it computes in; 0 = nothing is split
  std::vector<std::string> modules;  // names or patterns of those that may be; empty = all
  int64_t loss_tokens = 0;           // cross-entropy over so many tokens at once; 0 = off
  std::string head;                  // module whose output is the logits; empty = found by itself

  bool any() const { return max_bytes > 0 || loss_tokens > 0; }
};

struct OffloadConfig {
  std::string optimizer = "none", params = "none", activations = "none";  // "none" "host" "disk"
  // optimizer and params also "auto", until the engine has chosen (src/plan/cost/offload_choice.h)
  std::string gradients = "none";  // "none" (where the optimizer works) "host" "disk"
  std::string path;
  int64_t window_bytes = 192LL << 20;  // of memory, through which optimizer state on disk streams
  bool late_update = false;  // step() returns once the norm is known; updates end before each use
  bool checksums = false;    // what is read from disk is compared with what was written
  double timeout_s = 60.0;   // every wait for the disk, while no request ends
};

// Budgets in bytes per rank; -1 = what is found. On the CPU the device is host memory that is
// counted on its own; without a budget of its own it shares the host's.
struct MemoryConfig {
  int64_t device_bytes = -1, host_bytes = -1;
};

struct CheckpointConfig {
  std::string path;  // folder of the run's checkpoints, for save() and load() without one
  int keep = 0;      // so many newest stay; 0 = all
  std::vector<std::string> signals;  // on which step() saves: "SIGTERM" "SIGUSR1" "SIGUSR2"
};

// What a run writes down of itself (docs/monitoring.md).
struct MonitorConfig {
  std::string path;  // folder, made where there is none; empty = nothing
  std::vector<std::string> formats = {"jsonl"};  // "jsonl" "csv" "tensorboard" "wandb"
  int64_t every = 1;                             // steps between two rows
  std::string console = "none";                  // "none" "lines" "bar" "auto"
  int64_t events = 8192;    // of the timeline that are always kept; 0 = nothing is recorded
  int64_t trace_first = 0;  // step with which a trace begins; 0 = none
  int64_t trace_steps = 1;  // that it has
  std::string machine;      // what `penstock bench` wrote: seconds are predicted; empty = none
};

struct ActivationsConfig {
  int64_t checkpoint = 0;  // every so many-th unit is computed again in backward; 0 = none
};

struct MeshConfig {
  int data = 0;  // 0 = what the world leaves
  int tensor = 1, pipeline = 1, sequence = 1, expert = 1;
  int node = 1;  // how many nodes `data` is split in (hpZ, MiCS)
};

// How ranks compute a model together (docs/parallel.md).
struct ParallelConfig {
  // Name pattern (glob) of modules or parameters -> style: "column" "row" "vocab" ...; the first
  // that matches counts.
  std::vector<std::pair<std::string, std::string>> rules;
  // Modules with which the stages of a pipeline after the first begin; empty = found by itself.
  std::vector<std::string> stages;
  std::string schedule = "1f1b";  // "gpipe" "1f1b" "interleaved" (src/plan/pipeline_schedule.h)
  int virtual_stages = 1;         // of each rank; above 1 "gpipe" or "interleaved"
  bool cut_logits = false;        // logits of a head whose rule is "vocab" are gathered when read
  std::string norms =
      "whole";  // "tokens": between layers each tensor rank has a part of the tokens
};

struct PENSTOCK_API Config {
  std::string strategy = "zero3";                                   // a preset of src/plan/table.h
  std::map<std::string, std::map<std::string, std::string>> table;  // role -> phase -> placement
  MeshConfig mesh;
  ParallelConfig parallel;
  std::optional<std::string> precision;  // "fp32" "bf16" "fp16"; absent = as the model was built
  std::vector<std::pair<std::string, std::string>> dtypes;  // name pattern (glob) -> dtype
  OffloadConfig offload;
  MemoryConfig memory;
  ActivationsConfig activations;
  CheckpointConfig checkpoint;
  MonitorConfig monitor;
  std::optional<OptimizerConfig> optimizer;
  ScheduleConfig schedule;
  BatchConfig batch;
  LossScaleConfig loss_scale;
  double clip = 0.0;                // largest global gradient norm; 0 = off
  std::string nonfinite = "error";  // "error" "skip": what a step does with such gradients
  UnitsConfig units;
  TilingConfig tiling;
  int64_t prefetch_bytes = 64LL << 20;
  CommConfig comm;
  int64_t seed = -1;

  // JSON text in the native dialect. Throws ConfigError.
  static Config parse(const std::string& json_text);
  // Canonical JSON with every value, for `explain`; on one line, or indented by so many spaces.
  std::string json(int indent = -1) const;
  // The same, one "config /optimizer/lr = 0.001" a line, which ranks compare: without the folders,
  // which are a machine's own (offload.path, comm.report_dir, checkpoint.path, monitor.path,
  // monitor.machine).
  std::string lines() const;
  // Checks what depends on the number of ranks and fills in what follows from it (mesh.data,
  // batch). Throws ConfigError naming key, value and what would fit.
  void resolve(int world_size);
};

// Factor of the optimizer's lr for update number `step` (1 for the first). Warm-up rises linearly,
// 1 / warmup_steps at step 1 and 1 at step warmup_steps; then "constant" stays, "linear" and
// "cosine" (arXiv:1608.03983, no restarts) fall to min_ratio at total_steps and stay there.
PENSTOCK_API double lr_factor(const ScheduleConfig& schedule, int64_t step);

}  // namespace penstock
