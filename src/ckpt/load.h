#pragma once
// Load: reads any checkpoint into this run's state. The number of ranks, the strategy and the tiers
// may differ from those of the run that wrote the checkpoint. Each rank reads only the state that
// it holds.
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

// Reads elements of a checkpoint's tensors. Used by one thread.
class TensorReader {
 public:
  // Opens every file that the manifest names. Throws Damaged if one is missing or has a wrong size.
  TensorReader(const std::string& folder, const Manifest& manifest);

  // Reads elements in the tensor's own dtype. Throws Damaged.
  void read(const Tensor& tensor, int64_t begin, int64_t numel, char* to);
  // Checks every byte of every file. Throws Damaged at the first mismatch.
  void verify();
  int64_t bytes_read() const;  // bytes of tensors and of their checksums

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
  std::set<std::string> elsewhere{};  // parameters of other stages, which are checked there
};

// Returns whether the checkpoint has the parameter, under this name or another name of a tied
// weight.
bool has_parameter(const Manifest& manifest, const TensorLoadOptions& options,
                   const std::string& name);

// Throws one ConfigError that lists every missing or unexpected name, and every shape or dtype that
// does not match.
void check(const Manifest& manifest, const Target& target, const std::vector<std::string>& moments,
           const TensorLoadOptions& options);

// Reads all tensors of a state dict that belong to one tied parameter and checks that they have the
// same values. Throws ConfigError or Damaged.
void check_tied(TensorReader& reader, const Manifest& manifest, const TensorLoadOptions& options);

// [all ranks] Fills every copy. After an error, fill() still makes all collectives and then returns
// the error text. The state is then a mix of old and new values.
std::string fill(TensorReader& reader, const Manifest& manifest, const Target& target,
                 const TensorLoadOptions& options);

}  // namespace penstock::ckpt
