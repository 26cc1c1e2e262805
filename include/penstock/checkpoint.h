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
// a random number generator ("rng"), or the state of a user's optimizer ("optim.exp_avg").
struct CheckpointTensor {
  static constexpr int kAll = -1;          // the same on every rank; rank 0 writes it
  static constexpr int kIfDifferent = -2;  // rank 0's copy, or one per rank if the copies differ
  static constexpr int kPieces = -3;  // the slice that each rank updates, as in Values::shards()

  std::string role, name;
  std::vector<int64_t> shape;         // of the whole tensor
  int64_t begin = 0;                  // row-major index of the first element in the whole tensor
  int rank = kAll;                    // one of the constants above, or the owner's rank
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
  std::string problem;             // why this rank cannot save; makes save() throw on all ranks
  bool frozen = true;              // false: leaves out parameters that do not train
  bool in_window = false;  // true: may be called between two backwards of a window. Weights and
                           // optimizer state are those of the last step; gradients are left out.
};

// A checkpoint that is about to be loaded.
struct FoundCheckpoint {
  std::string path;
  int world = 0;                          // number of ranks that wrote it
  std::string front;                      // as in SaveOptions
  std::vector<std::string> of_ranks;      // one per rank that wrote the checkpoint
  std::vector<CheckpointTensor> tensors;  // all tensors, without values
  std::string client_state() const;       // JSON: the key "client_state" of `front`
  const CheckpointTensor* find(const std::string& role, const std::string& name) const;
};

struct LoadOptions {
  std::string tag;        // empty: the newest complete checkpoint
  bool optimizer = true;  // false: loads only weights and buffers
  // For tied weights: the parameter's name -> its other names in foreign state dicts.
  std::multimap<std::string, std::string> tied{};
  bool missing_ok = false;  // true: if there is no checkpoint at all, the result has an empty path
  // Returns the front's tensors that load() fills from a checkpoint. Called once for each
  // checkpoint that load() tries.
  std::function<std::vector<CheckpointTensor>(const FoundCheckpoint&)> tensors;
  // false: parameters that do not train keep their values if the checkpoint does not have them.
  bool frozen = true;
};

// A view of a core, for the model's thread.
class PENSTOCK_API Checkpoints {
 public:
  explicit Checkpoints(Core& core) : state_(core.state_) {}

  // [all ranks] Saves below `path`, between step() and the next backward. Returns the checkpoint's
  // path. Without `wait`, failure() reports errors that happen later. Throws ConfigError for an
  // invalid tag or for arguments that differ between ranks. If one rank could not save, throws
  // RuntimeFault with path and bytes on every rank, and no files of the checkpoint remain.
  std::string save(const std::string& path, const SaveOptions& options = {});
  // Requests a save. step() exchanges the requests of all ranks together with the norm. Afterwards
  // asked() returns the highest `urgency` (1 to 9) once, or 0 if there was no request. Only the
  // model's thread may call ask() and asked(); a signal handler on that thread may call ask().
  void ask(int urgency);
  int asked();
  // [all ranks] Waits until the save in progress has ended. Throws RuntimeFault if it failed.
  void wait();
  // Returns why a save without `wait` failed on this rank (on rank 0: on any rank). Returns each
  // failure only once.
  std::string failure();

  // [all ranks] Loads from a folder of checkpoints or from one checkpoint. Without a tag, skips
  // damaged checkpoints and prints a line on stderr for each. Before anything changes, throws
  // ConfigError that lists every name, shape and dtype that does not fit. Throws RuntimeFault if no
  // complete checkpoint is left. In that case, the engine can only load again or be closed.
  FoundCheckpoint load(const std::string& path, const LoadOptions& options = {});
  // [all ranks] Must be called after load(), once the front has applied its part of the result.
  // `problem` says why the front could not apply it; "" if it could. If any rank has a problem,
  // taken() throws RuntimeFault, and the engine can only load again or be closed.
  void taken(const std::string& problem);
  // Returns whether `path` has a complete checkpoint. Not collective.
  static bool any(const std::string& path);
  int64_t bytes_held() const;     // bytes of this rank's tensors that a save writes
  int64_t bytes_read() const;     // tensor bytes that this rank read in the last load
  int64_t bytes_written() const;  // bytes of this rank's shard in the last save

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
