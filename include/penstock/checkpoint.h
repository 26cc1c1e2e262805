#pragma once
// Checkpoints: saves a core's training state in a folder of safetensors files, and loads it into
// any number of ranks, any strategy and any tiers (docs/checkpoints.md; format: docs/formats.md).
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// A tensor that the front keeps and the core does not know: a model buffer ("buffer"), the state of
// a random number generator ("rng"), state of a user's optimizer ("optim.exp_avg").
struct CheckpointTensor {
  static constexpr int kAll = -1;          // the same on every rank; rank 0 writes it
  static constexpr int kIfDifferent = -2;  // rank 0's, or every rank's if they differ
  static constexpr int kPieces = -3;  // the slice that each rank updates, as in Values::shards()

  std::string role, name;
  std::vector<int64_t> shape;         // of the whole tensor
  int64_t begin = 0;                  // index in it of the first element of `tensor`, row by row
  int rank = kAll;                    // one of the constants above, or the rank it belongs to
  at::Tensor tensor;                  // on the CPU
  at::ScalarType dtype = at::kFloat;  // set by load()
};

struct SaveOptions {
  std::string tag;             // the checkpoint's folder; empty: "step-N"
  bool wait = true;            // false: training continues while the files are written
  std::string front = "{}";    // JSON of the front's state that is the same on every rank
  std::string of_rank = "{}";  // JSON of this rank's part of the front's state
  std::vector<CheckpointTensor> tensors;
  std::function<void()> starting;  // for tests: called by the writing thread before it writes
  std::string problem;             // why this rank cannot save: becomes an error on all ranks
};

// A checkpoint that is about to be loaded.
struct FoundCheckpoint {
  std::string path;
  int world = 0;                          // number of ranks that wrote it
  std::string front;                      // as in SaveOptions
  std::vector<std::string> of_ranks;      // by rank that wrote the checkpoint
  std::vector<CheckpointTensor> tensors;  // all tensors, without values
  std::string client_state() const;       // JSON: the key "client_state" of `front`
  const CheckpointTensor* find(const std::string& role, const std::string& name) const;
};

struct LoadOptions {
  std::string tag;        // empty: the newest complete checkpoint
  bool optimizer = true;  // false: only the weights
  // For tied weights: the parameter's name -> other names of it in foreign state dicts.
  std::multimap<std::string, std::string> tied{};
  bool missing_ok = false;  // true: if there is no checkpoint at all, the result has an empty path
  // Returns the tensors that the front wants filled from a checkpoint. Called again if another
  // checkpoint is tried.
  std::function<std::vector<CheckpointTensor>(const FoundCheckpoint&)> tensors;
};

// A view of a core, for the thread that runs the model.
class PENSTOCK_API Checkpoints {
 public:
  explicit Checkpoints(Core& core) : state_(core.state_) {}

  // [all ranks] Saves below `path`, between step() and the next backward. Returns the checkpoint's
  // path. Without `wait`, failure() reports later errors. Throws ConfigError for an invalid tag or
  // for arguments that differ between ranks. Throws RuntimeFault on every rank, with path and
  // bytes, if one rank could not save; no files of the checkpoint remain then.
  std::string save(const std::string& path, const SaveOptions& options = {});
  // Requests a save. step() shares the request with all ranks together with the norm. asked() then
  // returns the highest `urgency` (1 to 9; 0: no request), once. From the thread that runs the
  // model, also in a signal handler on it.
  void ask(int urgency);
  int asked();
  // [all ranks] Waits until the save in progress has ended. Throws RuntimeFault if it failed.
  void wait();
  // Returns, once, why a save that was not waited for failed on this rank. Rank 0 reports failures
  // of all ranks.
  std::string failure();

  // [all ranks] Loads from a folder of checkpoints or from one checkpoint. A damaged newest
  // checkpoint is skipped, with a line on stderr, unless a tag asks for it. Throws ConfigError with
  // every name, shape and dtype that does not fit, before anything is changed. Throws RuntimeFault
  // if no complete checkpoint is left; afterwards the engine can only load or be closed.
  FoundCheckpoint load(const std::string& path, const LoadOptions& options = {});
  // [all ranks] Must be called when the front has applied its part of load()'s result, or with the
  // `problem` that kept it from that. With a problem on any rank this throws RuntimeFault, and the
  // engine can only load again or be closed.
  void taken(const std::string& problem);
  // Returns whether there is a complete checkpoint. Not collective.
  static bool any(const std::string& path);
  int64_t bytes_held() const;     // size of this rank's tensors that a save writes
  int64_t bytes_read() const;     // tensor bytes that this rank read in the last load
  int64_t bytes_written() const;  // of this rank's shard, in the last save

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
