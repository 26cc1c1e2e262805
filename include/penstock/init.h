#pragma once
// ShardedInit: parameters that are sharded over the ranks before an engine exists.
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "penstock/export.h"
#include "penstock/group.h"

namespace penstock {

// A *hollow* tensor has a shape, a dtype and a storage without memory; this object keeps an equal
// part of its values on each rank. Any other access to its values throws an error that explains
// this. All ranks make the calls marked [all ranks] in the same order, from one thread. The other
// calls concern this rank only: ranks may free hollow tensors at different times. The peak memory
// is one whole tensor and its part, and also all other parts unless they are on disk.
class PENSTOCK_API ShardedInit {
 public:
  explicit ShardedInit(std::shared_ptr<Group> group);
  ~ShardedInit();

  // Exchanges through `group` from now on; hollow tensors stay hollow. Throws RuntimeFault if this
  // rank or the number of ranks is another than in the first group.
  void connect(std::shared_ptr<Group> group);
  // Makes an unlinked file for parts in each of the folders in `path` (separated by ':'), unless it
  // exists. Throws ConfigError for a folder in which no file can be made.
  void open(const std::string& path);
  // Makes `tensor`, which is dense and on the CPU, hollow. This rank keeps its part of the values
  // in memory or, if `path` is given, in the files of `path`.
  void hollow(const at::Tensor& tensor, const std::string& path = "");
  // Returns a hollow tensor with the values and the shape of the hollow `tensor`. Copies this
  // rank's part of the whole storage behind it, to memory or to the files that have that part.
  at::Tensor copy(const at::Tensor& tensor);
  // Returns whether the tensor (or the tensor that it is a view of) is hollow.
  bool holds(const at::Tensor& tensor) const;
  // [all ranks] Returns the values of the whole storage behind a hollow tensor, one-dimensional.
  at::Tensor whole(const at::Tensor& tensor) const;
  // Returns uninitialized memory of the size that whole() returns, for a caller that overwrites it
  // all.
  at::Tensor scratch(const at::Tensor& tensor) const;
  // Stores this rank's part of `values`, which have the form that whole() returns.
  void keep(const at::Tensor& tensor, const at::Tensor& values);
  // [all ranks] Returns the tensor's values in its own shape and frees the part.
  at::Tensor take(const at::Tensor& tensor);
  // [all ranks] Copies rank 0's bytes to all ranks.
  void broadcast(const at::Tensor& bytes) const;

  // Returns whether no tensor that is still in use on this rank is hollow. Closes unused files.
  bool empty();

 private:
  struct Impl;
  std::unique_ptr<Impl> state_;
};

}  // namespace penstock
