#pragma once
// Load: reads any checkpoint into this run's state. The number of ranks, the strategy and the tiers
// may differ from those of the run that wrote it. Each rank reads only what it holds.
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "src/ckpt/inventory.h"
#include "src/ckpt/save.h"
#include "src/ckpt/shard.h"
#include "src/mem/tiers.h"

namespace penstock::ckpt {

// Reads elements of a checkpoint's tensors. One thread.
class TensorReader {
 public:
  // Opens every file that the manifest names. Throws Damaged if one is missing or has another size.
  TensorReader(const std::string& folder, const Manifest& manifest);

  // Reads elements in the tensor's own dtype. Throws Damaged.
  void read(const Tensor& tensor, int64_t begin, int64_t numel, char* to);
  // Checks every byte of every file. Throws Damaged for the first that is wrong.
  void verify();
  int64_t bytes_read() const;  // of tensors and their checksums

 private:
  const Manifest& manifest_;
  std::vector<std::unique_ptr<ShardReader>> files_;
};

struct TensorLoadOptions {
  bool optimizer = true;  // false: weights and buffers only
  // Tied weights: the parameter's name, and other names that a state dict may use for it.
  std::multimap<std::string, std::string> tied{};
};

// The state that a checkpoint is loaded into.
struct Target {
  exec::Executor& executor;
  mem::Tiers& tiers;
  const GlobalOf& global_of;
  std::vector<Holding> holdings;
  std::vector<Extra> extras;
  std::set<std::string> elsewhere{};  // parameters of other stages, which check them themselves
};

// Throws one ConfigError that lists every missing or unexpected name, and every shape or dtype that
// does not match.
void check(const Manifest& manifest, const Target& target, const std::vector<std::string>& moments,
           const TensorLoadOptions& options);

// Checks that all tensors of a state dict that belong to one tied parameter have the same values.
// Reads them. Throws ConfigError, Damaged.
void check_tied(TensorReader& reader, const Manifest& manifest, const TensorLoadOptions& options);

// Fills every copy. [all ranks] After an error it still takes part in all collectives, and returns
// the error; the state is then neither the old nor the new.
std::string fill(TensorReader& reader, const Manifest& manifest, const Target& target,
                 const TensorLoadOptions& options);

}  // namespace penstock::ckpt
