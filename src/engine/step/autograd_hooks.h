#pragma once
// Autograd hooks in C++: they take no GIL and cost nothing per op.
#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_map>
#include <vector>

#include "src/exec/torch_compat.h"

namespace penstock::engine {

// True inside a backward (also in what activation checkpointing recomputes there).
bool in_backward();

// True inside a torch.autograd.grad(): it returns gradients and accumulates none.
bool in_side_backward();

// Runs `done` when the outermost backward in progress ends without an error.
void at_end_of_backward(std::function<void()> done);

// Of the graph that this thread records.
uint64_t now();

// Runs `before` when the backward reaches one of the tensors that need a gradient, of those that
// were made since then: a unit may return what it was given.
void before_backward_of(const std::vector<at::Tensor>& outputs, uint64_t since,
                        const std::function<void()>& before);

// Whether their backward reads no parameter: each was looked up in one, row by row.
bool only_looked_up(const std::vector<at::Tensor>& outputs);

// Runs `taken` each time autograd has finished accumulating into a leaf's .grad. Removed with the
// object. Move-only.
class GradientHook {
 public:
  GradientHook(const at::Tensor& leaf, std::function<void()> taken);
  GradientHook(GradientHook&& other) noexcept = default;
  GradientHook& operator=(GradientHook&&) = delete;
  ~GradientHook();
  // Whether the backward in progress may accumulate into the leaf.
  bool expected() const;
  // Follows a leaf that got another accumulator (Tensor.set_(), say).
  void follow();

 private:
  void install();
  void remove();

  at::Tensor leaf_;
  std::function<void()> taken_;
  exec::NodePtr accumulator_;  // tensors hold it weakly only
  uintptr_t key_ = 0;
};

// [Note: Outside reads] A parameter may be read outside the module that owns it. In the first
// forward every op is looked at (a fallback on a dispatch key that torch leaves to others, about
// 0.1 us per op): one that is about to read a freed parameter gathers its unit first, and the unit
// is whole for the entire pass from then on. Later passes run without the fallback; a freed
// parameter that is read then raises the guard's error.
class OutsideReads {
 public:
  // `found` gathers the parameter's unit. Keys are the parameters' storages.
  OutsideReads(std::unordered_map<const c10::StorageImpl*, int> unit_of_storage,
               std::function<void(int)> found);
  ~OutsideReads();
  OutsideReads(const OutsideReads&) = delete;
  OutsideReads& operator=(const OutsideReads&) = delete;

  // Called for each op's tensors while this object watches the current thread.
  void look_at(const at::Tensor& tensor) const;

 private:
  std::unordered_map<const c10::StorageImpl*, int> unit_of_storage_;
  std::function<void(int)> found_;
  OutsideReads* outer_;
};

}  // namespace penstock::engine
