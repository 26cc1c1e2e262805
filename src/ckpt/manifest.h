#pragma once
// Manifest: lists what a checkpoint holds and where (docs/formats.md). Each rank's part has the
// same form; merge() combines the parts. Pure values; any thread.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "src/ckpt/json.h"

namespace penstock::ckpt {

inline constexpr int kFormatVersion = 1;

// Elements [begin, end) of a tensor in row-major order, at byte `offset` of a file.
struct Slice {
  int64_t begin = 0, end = 0;
  int file = 0;
  int64_t offset = 0;
};

// A logical tensor of the training state.
struct Tensor {
  std::string role;  // "param", the optimizer's name for it ("exp_avg"), "buffer", ...
  std::string name;  // the model's name for it
  int rank = -1;     // the owner, if each rank has its own values; else -1
  std::vector<int64_t> shape;
  std::string dtype;  // safetensors' name of the dtype
  std::vector<Slice> slices;

  std::string key() const;  // "param/layer.weight", "rng/torch@rank1"
  int64_t numel() const;
};

// A safetensors file. The bytes from `data` to `table` have one checksum per `granule` bytes. The
// checksums lie from `table` to the end, eight bytes each.
struct File {
  std::string name;
  int64_t bytes = 0, data = 0, table = 0, granule = 0;
  std::string checksum;  // of the bytes from `table` to the end
};

struct Manifest {
  int world = 0;
  Json about = Json::object();  // versions, config, plan: for people to read
  Json state = Json::object();  // the engine's counters, equal on all ranks
  Json front = Json::object();  // what the front keeps on rank 0
  std::vector<Json> ranks;      // what the front keeps on each rank
  std::vector<File> files;
  std::vector<Tensor> tensors;

  std::string text() const;
  // Throws Damaged for text of another version, with another checksum, or with invalid names, sizes
  // or offsets. If `complete`, tensors with gaps are invalid, too.
  static Manifest parse(std::string_view text, bool complete = true);

  const Tensor* find(const std::string& key) const;

 private:
  mutable std::map<std::string, size_t> by_key_;
};

// Combines the parts of all ranks, in rank order. Throws RuntimeFault if a tensor's shape or dtype
// differs between parts.
Manifest merge(const std::vector<Manifest>& parts);

}  // namespace penstock::ckpt
