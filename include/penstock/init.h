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
// this. All ranks make the same calls in the same order, from one thread. The peak memory is one
// whole tensor and its part, plus all parts unless they are on disk.
class PENSTOCK_API ShardedInit {
 public:
  // The parts are in memory or, if `path` is given (folders, separated by ':'), in unlinked files
  // of each rank. Throws ConfigError for a folder in which no file can be made.
  explicit ShardedInit(std::shared_ptr<Group> group, const std::string& path = "");
  ~ShardedInit();

  // Makes `tensor`, which is dense and on the CPU, hollow; this rank keeps its part of the values.
  void hollow(const at::Tensor& tensor);
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

  bool empty() const;  // true if no tensor that is still in use is hollow

 private:
  struct Impl;
  std::unique_ptr<Impl> state_;
};

}  // namespace penstock
