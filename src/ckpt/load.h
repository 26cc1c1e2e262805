#pragma once
// Load: from any checkpoint into this run's state, whatever the ranks, the strategy and the tiers
// of the run that wrote it. Each rank reads what it holds itself.
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
  // Opens every file that the manifest names: throws Damaged where one is missing or of another
  // size.
  TensorReader(const std::string& folder, const Manifest& manifest);

  // In the tensor's own dtype. Throws Damaged.
  void read(const Tensor& tensor, int64_t begin, int64_t numel, char* to);
  // Every byte of every file. Throws Damaged with the first that is wrong.
  void verify();
  int64_t bytes_read() const;  // of tensors and their checksums

 private:
  const Manifest& manifest_;
  std::vector<std::unique_ptr<ShardReader>> files_;
};

struct TensorLoadOptions {
  bool optimizer = true;  // else the weights and buffers alone
  // Of tied weights: the parameter's name, and others that a state dict may have it by.
  std::multimap<std::string, std::string> tied{};
};

// What a checkpoint is loaded into.
struct Target {
  exec::Executor& executor;
  mem::Tiers& tiers;
  const GlobalOf& global_of;
  std::vector<Holding> holdings;
  std::vector<Extra> extras;
  std::set<std::string> elsewhere{};  // parameters of other stages, which look for them
};

// Throws ConfigError with every name that is missing or too many, and every shape or dtype that
// does not fit, at once.
void check(const Manifest& manifest, const Target& target, const std::vector<std::string>& moments,
           const TensorLoadOptions& options);

// What a state dict has by several names of one parameter must be the same. Reads it. Throws
// ConfigError, Damaged.
void check_tied(TensorReader& reader, const Manifest& manifest, const TensorLoadOptions& options);

// Fills every copy. [all ranks] It takes part in all that the ranks do together also after an
// error, which it returns: then the state is neither the old nor the new.
std::string fill(TensorReader& reader, const Manifest& manifest, const Target& target,
                 const TensorLoadOptions& options);

}  // namespace penstock::ckpt
