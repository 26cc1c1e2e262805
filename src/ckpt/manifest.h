#pragma once
// Manifest: what a checkpoint holds and where (docs/formats.md). One rank's part of it has the same
// form; merge() makes the whole of the parts. Pure values; any thread.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "src/ckpt/json.h"

namespace penstock::ckpt {

inline constexpr int kFormatVersion = 1;

// Elements [begin, end) of a tensor, row by row, at a byte of a file.
struct Slice {
  int64_t begin = 0, end = 0;
  int file = 0;
  int64_t offset = 0;
};

// A logical tensor of the training state.
struct Tensor {
  std::string role;  // "param", or what the optimizer calls it ("exp_avg"), "buffer", ...
  std::string name;  // as the model has it
  int rank = -1;     // of whom it is, where ranks have their own; else -1
  std::vector<int64_t> shape;
  std::string dtype;  // as safetensors names it
  std::vector<Slice> slices;

  std::string key() const;  // "param/layer.weight", "rng/torch@rank1"
  int64_t numel() const;
};

// A safetensors file. Its bytes from `data` to `table` are checked in pieces of `granule`; the
// pieces' checksums are at `table`, to the end, eight bytes each.
struct File {
  std::string name;
  int64_t bytes = 0, data = 0, table = 0, granule = 0;
  std::string checksum;  // of the table
};

struct Manifest {
  int world = 0;
  Json about = Json::object();  // versions, config, plan: for people
  Json state = Json::object();  // the engine's numbers, the same on every rank
  Json front = Json::object();  // what the front keeps, of rank 0
  std::vector<Json> ranks;      // and of every rank
  std::vector<File> files;
  std::vector<Tensor> tensors;

  std::string text() const;
  // Throws Damaged for text of another version, with another checksum, or with names, sizes or
  // offsets that cannot be. `complete`: also where tensors have gaps.
  static Manifest parse(std::string_view text, bool complete = true);

  const Tensor* find(const std::string& key) const;

 private:
  mutable std::map<std::string, size_t> by_key_;
};

// Of each rank's part, in their order. Throws RuntimeFault where they do not fit together.
Manifest merge(const std::vector<Manifest>& parts);

}  // namespace penstock::ckpt
