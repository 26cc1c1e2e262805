#pragma once
// ShardedInit: parameters that are sharded over the ranks before an engine exists.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/export.h"
#include "penstock/group.h"

namespace penstock {

class WeightsFile;  // src/ckpt/weights_file.h

// The values of one tensor in a file, in row-major order.
struct FileValues {
  std::shared_ptr<const WeightsFile> file;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  // first byte
};

// Where a hollow tensor's values are until the engine takes them, and the tensor's device in
// training.
struct InitPlace {
  std::string path;                     // folders of the files for the parts; "": in memory
  std::optional<c10::Device> device{};  // default: the tensor's own device
};

// A *hollow* tensor has a shape, a dtype and a storage without memory; this object keeps an equal
// part of the values on each rank. Any other access to the values throws an error that explains
// hollow tensors. All ranks make the calls marked [all ranks] in the same order, from one thread.
// The other calls concern this rank only: ranks may free hollow tensors at different times. The
// peak memory is one whole tensor, plus all parts in memory (parts may be on disk instead).
class PENSTOCK_API ShardedInit {
 public:
  explicit ShardedInit(std::shared_ptr<Group> group);
  ~ShardedInit();

  // Exchanges through `group` from now on; hollow tensors stay hollow. Throws RuntimeFault if the
  // size of the first group, or this process's rank in it, was different.
  void connect(std::shared_ptr<Group> group);
  // `path` lists folders, separated by ':'. Makes an unlinked file for parts in each folder that
  // has none yet. Throws ConfigError for a folder in which no file can be made.
  void open(const std::string& path);
  // Makes a dense tensor hollow. This rank keeps its part of the values in host memory or in the
  // files of `place`, even if the tensor is on a device.
  void hollow(const at::Tensor& tensor, const InitPlace& place = {});
  // Makes `tensor` hollow, or frees its part if it is hollow already. From now on its values are
  // those in the file; each rank reads them in parts when they are used. keep() gives the tensor a
  // part again. A tensor on the meta device moves to the CPU. If `tensor` is hollow already, it
  // must cover its whole storage.
  void read_from(const at::Tensor& tensor, const FileValues& values, const InitPlace& place = {});
  // Returns a hollow tensor with the values and the shape of the hollow `tensor`. Copies this
  // rank's part of the tensor's whole storage, from memory to memory or from file to file.
  at::Tensor copy(const at::Tensor& tensor);
  // Returns whether the tensor (or the tensor that it is a view of) is hollow.
  bool holds(const at::Tensor& tensor) const;
  // Returns whether the values of the tensor are in a file of read_from().
  bool in_file(const at::Tensor& tensor) const;
  // Returns the file of a tensor that is in a file, and where the values begin there.
  FileValues file_of(const at::Tensor& tensor) const;
  // Fills `to` [count] (fp32, on the host) with values of a tensor that is in a file, beginning at
  // the tensor's element `begin` in row-major order.
  void read(const at::Tensor& tensor, int64_t begin, const at::Tensor& to) const;
  // Returns the bytes of host memory that this rank's part of a hollow tensor takes.
  int64_t held_bytes(const at::Tensor& tensor) const;
  // Returns the device on which a hollow tensor trains.
  c10::Device device_of(const at::Tensor& tensor) const;
  // [all ranks] Returns the values of the whole storage behind a hollow tensor, one-dimensional, on
  // the tensor's device.
  at::Tensor whole(const at::Tensor& tensor) const;
  // Returns uninitialized memory with the size of whole()'s result, for a caller that overwrites
  // all of it.
  at::Tensor scratch(const at::Tensor& tensor) const;
  // Stores this rank's part of `values`, which have the form of whole()'s result.
  void keep(const at::Tensor& tensor, const at::Tensor& values);
  // [all ranks] Returns the tensor's values in its own shape, in host memory, and frees the part.
  at::Tensor take(const at::Tensor& tensor);
  // Frees the part; its values are lost. The tensor stays without memory.
  void drop(const at::Tensor& tensor);
  // [all ranks] Returns the texts of all ranks, by rank.
  std::vector<std::string> share(const std::string& text) const;
  // [all ranks] Copies rank 0's bytes to all ranks.
  void broadcast(const at::Tensor& bytes) const;

  // Returns true if no tensor that this rank still uses is hollow. Closes unused files.
  bool empty();

 private:
  struct Impl;
  std::unique_ptr<Impl> state_;
};

}  // namespace penstock
