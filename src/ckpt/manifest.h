#pragma once
// Manifest: lists the tensors of a checkpoint and their places in its files (docs/formats.md). Each
// rank's part of the manifest has the same form, and merge() combines the parts. Plain values;
// usable from any thread.
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
  std::string role;  // "param", "buffer", ..., or the optimizer's name for the state ("exp_avg")
  std::string name;  // name in the model
  int rank = -1;     // the owner if each rank has its own values; else -1
  std::vector<int64_t> shape;
  std::string dtype;  // safetensors name of the dtype
  std::vector<Slice> slices;

  std::string key() const;  // "param/layer.weight", "rng/torch@rank1"
  int64_t numel() const;
};

// A safetensors file. For the bytes from `data` to `table`, there is one checksum per `granule`
// bytes. These checksums, eight bytes each, are stored from `table` to the end of the file.
struct File {
  std::string name;
  int64_t bytes = 0, data = 0, table = 0, granule = 0;
  std::string checksum;  // checksum of the bytes from `table` to the end
};

struct Manifest {
  int world = 0;
  Json about = Json::object();  // versions, config and plan, for people to read
  Json state = Json::object();  // the engine's counters, equal on all ranks
  Json front = Json::object();  // the front's state on rank 0
  std::vector<Json> ranks;      // the front's state on each rank
  std::vector<File> files;
  std::vector<Tensor> tensors;

  std::string text() const;
  // Throws Damaged if the text has a wrong version, a wrong checksum, or invalid names, sizes or
  // offsets. If `complete` is set, it also throws Damaged for a tensor with gaps.
  static Manifest parse(std::string_view text, bool complete = true);
  // Reads the manifest file of a checkpoint and adds the file's name to errors of parse(). If
  // `text` is not null, `*text` receives the file's text. Throws RuntimeFault if the file cannot be
  // read.
  static Manifest read(const std::string& path, std::string* text = nullptr);

  const Tensor* find(const std::string& key) const;

 private:
  mutable std::map<std::string, size_t> by_key_;
};

// Combines the manifest parts of all ranks, which are given in rank order. Throws RuntimeFault if a
// tensor's shape or dtype differs between parts.
Manifest merge(const std::vector<Manifest>& parts);

}  // namespace penstock::ckpt
