#pragma once
// Checkpoints: a core's training state in a folder of safetensors files, and back, into any number
// of ranks, strategy and tiers (docs/checkpoints.md; the format: docs/formats.md).
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

// A tensor that the front keeps and the core does not know: a buffer of the model ("buffer"), the
// state of a generator of random numbers ("rng"), what an optimizer of the user's own keeps
// ("optim.exp_avg").
struct CheckpointTensor {
  static constexpr int kAll = -1;          // the same on every rank; rank 0 writes it
  static constexpr int kIfDifferent = -2;  // rank 0's, or where ranks differ, everyone's
  static constexpr int kPieces = -3;       // what each rank updates of it, as Values::shards()

  std::string role, name;
  std::vector<int64_t> shape;         // of the whole tensor
  int64_t begin = 0;                  // element of it that `tensor` begins with, row by row
  int rank = kAll;                    // or of whom it is
  at::Tensor tensor;                  // on the CPU
  at::ScalarType dtype = at::kFloat;  // of one that was found
};

struct SaveOptions {
  std::string tag;             // the checkpoint's folder; empty: "step-N"
  bool wait = true;            // else training goes on while it is written
  std::string front = "{}";    // JSON of what the front keeps, the same on every rank
  std::string of_rank = "{}";  // and of this rank
  std::vector<CheckpointTensor> tensors;
  std::function<void()> starting;  // called by the thread that writes, before it does; for tests
  std::string problem;             // what keeps this rank from it: an error on all of them
};

// A checkpoint that is about to be loaded.
struct FoundCheckpoint {
  std::string path;
  int world = 0;                          // ranks that wrote it
  std::string front;                      // as in SaveOptions
  std::vector<std::string> of_ranks;      // by rank that wrote it
  std::vector<CheckpointTensor> tensors;  // all, without values
  std::string client_state() const;       // JSON: the key of that name of `front`
  const CheckpointTensor* find(const std::string& role, const std::string& name) const;
};

struct LoadOptions {
  std::string tag;        // empty: the newest that is whole
  bool optimizer = true;  // else the weights alone
  // Of tied weights: the parameter's name, and others that foreign state dicts have it by.
  std::multimap<std::string, std::string> tied{};
  bool missing_ok = false;  // where there is no checkpoint at all, the answer has no path
  // What the front wants of a checkpoint: tensors that are filled. Called again for another one.
  std::function<std::vector<CheckpointTensor>(const FoundCheckpoint&)> tensors;
};

// A view of a core, for the thread that runs the model.
class PENSTOCK_API Checkpoints {
 public:
  explicit Checkpoints(Core& core) : state_(core.state_) {}

  // [all ranks] Saves below `path`, between step() and the next backward. Returns the checkpoint's
  // path. Without `wait`, what goes wrong later is told by failure(). Throws ConfigError for a tag
  // that is no name or for arguments that are not the same on every rank; RuntimeFault on every
  // rank, with the path and the bytes, where one could not save: then nothing is left of it.
  std::string save(const std::string& path, const SaveOptions& options = {});
  // Asks for a save: step() tells all ranks of it, with the norm, and asked() says there what the
  // highest `urgency` was (1 to 9; 0: nobody asked), once. From the thread that runs the model,
  // also in a handler of a signal there.
  void ask(int urgency);
  int asked();
  // [all ranks] The save that is under way has ended. Throws RuntimeFault where it failed.
  void wait();
  // Why a save that nobody waited for has failed on this rank (rank 0 knows of all); once.
  std::string failure();

  // [all ranks] Loads from a folder of checkpoints, or from one itself. A newest one that is
  // damaged is passed over, with a line on stderr, unless a tag asks for it. Throws ConfigError
  // with every name, shape and dtype that does not fit, before anything is changed; RuntimeFault
  // where there is no whole one, after which the engine can only load or be closed.
  FoundCheckpoint load(const std::string& path, const LoadOptions& options = {});
  // [all ranks] To be called when the front has taken over its part of what load() gave, or with
  // its `problem`: then the engine is of use for another load() alone, and this throws
  // RuntimeFault.
  void taken(const std::string& problem);
  // Whether there is a complete one. Not collective.
  static bool any(const std::string& path);
  int64_t bytes_held() const;     // of tensors that are saved, by this rank
  int64_t bytes_read() const;     // of tensors, in the last load, by this rank
  int64_t bytes_written() const;  // of this rank's shard, in the last save

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
