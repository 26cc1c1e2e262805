#pragma once
// ShardedInit: parameters that are in pieces over the ranks before there is an engine.
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "penstock/export.h"
#include "penstock/group.h"

namespace penstock {

// A *hollow* tensor has a shape, a dtype and a storage without memory; every rank keeps an equal
// part of its values here. Reading it elsewhere raises an error that says so. All ranks make the
// same calls in the same order, from one thread. Peak memory: the parts, unless on disk, and one
// whole tensor with its part.
class PENSTOCK_API ShardedInit {
 public:
  // The parts are in memory or, with `path` (folders, ':' between them), in an unlinked file of
  // this rank. Throws ConfigError for a folder that takes no files.
  explicit ShardedInit(std::shared_ptr<Group> group, const std::string& path = "");
  ~ShardedInit();

  // `tensor`, dense on the CPU, becomes hollow; this rank keeps its part of the values it had.
  void hollow(const at::Tensor& tensor);
  // Whether the tensor (or what it is a view of) is hollow.
  bool holds(const at::Tensor& tensor) const;
  // [all ranks] The values of the whole storage behind a hollow tensor: one dimension.
  at::Tensor whole(const at::Tensor& tensor) const;
  // Memory for such values that are all about to be overwritten.
  at::Tensor scratch(const at::Tensor& tensor) const;
  // This rank keeps its part of `values`, as whole() gives them.
  void keep(const at::Tensor& tensor, const at::Tensor& values);
  // [all ranks] The tensor's values in its own shape; the part is let go.
  at::Tensor take(const at::Tensor& tensor);
  // [all ranks] Rank 0's bytes everywhere.
  void broadcast(const at::Tensor& bytes) const;

  bool empty() const;  // nothing that is still in use is hollow

 private:
  struct Impl;
  std::unique_ptr<Impl> state_;
};

}  // namespace penstock
