#pragma once
// Checkpoint files without an engine: writes a checkpoint of tensors from any source, and reads one
// (docs/formats.md, "Checkpoint"). Usable by one thread at a time; not collective.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace penstock {

struct StoredTensor {
  std::string role;  // "param", "buffer", "exp_avg", ...; "weight": either a parameter or a buffer
  std::string name;  // name in the model
  int rank = -1;     // the owner if each rank has its own values; else -1
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  int same_as =
      -1;  // index of another tensor of the same shape and dtype that has the same values; else -1
};

// JSON objects of the manifest.
struct StoredState {
  std::string about = "{}", state = "{}", front = "{}", of_rank = "{}";
};

// Writes a checkpoint in the form that a run with one rank writes. If commit() is not called, the
// destructor removes the files.
class PENSTOCK_API CheckpointWriter {
 public:
  // Reserves the disk space. Throws ConfigError for an invalid tag, duplicate tensors, and dtypes
  // that the format does not have. Throws RuntimeFault if there is not enough space.
  CheckpointWriter(const std::string& root, const std::string& tag,
                   std::vector<StoredTensor> tensors, const StoredState& state);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Writes all values of one tensor. `values` is on the CPU and has the tensor's shape and dtype.
  // Each tensor must be written once, in any order. Throws ConfigError for any other call. Throws
  // RuntimeFault, with path and bytes, if writing fails.
  void write(int index, const at::Tensor& values);
  // Makes the checkpoint durable and points `latest` to it. Returns the checkpoint's path. Throws
  // ConfigError if a tensor has no values.
  std::string commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> files_;
};

// Reads a complete checkpoint. Throws RuntimeFault for missing or damaged files.
class PENSTOCK_API CheckpointReader {
 public:
  // Opens the checkpoint at `path`. If `path` is a folder of checkpoints, opens the one named `tag`
  // or, if `tag` is empty, the newest one.
  explicit CheckpointReader(const std::string& path, const std::string& tag = "");
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const StoredState& state() const { return state_; }
  // Reads all values of one tensor and checks their checksums.
  at::Tensor read(int index);
  // Reads every byte and checks all checksums.
  void verify();

 private:
  struct Impl;
  std::string path_;
  std::vector<StoredTensor> tensors_;
  StoredState state_;
  std::unique_ptr<Impl> files_;
};

// A tensor of a safetensors file and the position of its values.
struct SafetensorsEntry {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  // first byte in the file
};
// Reads the header of a safetensors file and checks it against the file's size. Throws
// RuntimeFault.
PENSTOCK_API std::vector<SafetensorsEntry> read_safetensors_head(const std::string& path);

}  // namespace penstock
