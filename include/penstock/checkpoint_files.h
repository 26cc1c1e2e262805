#pragma once
// A checkpoint's files without an engine: to make one of tensors that come from elsewhere, and to
// read one (docs/formats.md, "Checkpoint"). One thread at a time; not collective.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace penstock {

struct StoredTensor {
  std::string role;  // "param", "buffer", "exp_avg", ...; "weight": a parameter or a buffer
  std::string name;  // as the model has it
  int rank = -1;     // of whom it is, where ranks have their own
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  int same_as = -1;  // index of another one of its shape and dtype, whose values it shares
};

// JSON objects, as the manifest has them.
struct StoredState {
  std::string about = "{}", state = "{}", front = "{}", of_rank = "{}";
};

// Makes a checkpoint, as of one rank. What was not committed is taken away.
class PENSTOCK_API CheckpointWriter {
 public:
  // Claims the space. Throws ConfigError for a tag that is no name, tensors that are there twice,
  // and dtypes that the format has not; RuntimeFault where there is no room.
  CheckpointWriter(const std::string& root, const std::string& tag,
                   std::vector<StoredTensor> tensors, const StoredState& state);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // All values of one, in any order of tensors, each once; on the CPU, in its shape and dtype.
  // Throws ConfigError for others; RuntimeFault with path and bytes.
  void write(int index, const at::Tensor& values);
  // It is durable and `latest` names it. Returns its path. Throws ConfigError where a tensor has no
  // values.
  std::string commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> files_;
};

// Reads a complete one. Throws RuntimeFault for what is missing or damaged.
class PENSTOCK_API CheckpointReader {
 public:
  // A checkpoint, or a folder of them: then the one of that tag, or the newest.
  explicit CheckpointReader(const std::string& path, const std::string& tag = "");
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const StoredState& state() const { return state_; }
  // All values of one; their checksums were compared.
  at::Tensor read(int index);
  // Every byte is as it was written.
  void verify();

 private:
  struct Impl;
  std::string path_;
  std::vector<StoredTensor> tensors_;
  StoredState state_;
  std::unique_ptr<Impl> files_;
};

// A tensor of a safetensors file: where in it its values are.
struct SafetensorsEntry {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  // byte of the file
};
// What the file's head says, checked against its size. Throws RuntimeFault.
PENSTOCK_API std::vector<SafetensorsEntry> read_safetensors_head(const std::string& path);

}  // namespace penstock
