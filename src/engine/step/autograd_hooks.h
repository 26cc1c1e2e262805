#pragma once
// Autograd hooks in C++. They take no GIL and add no cost per op.
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "src/device/torch_compat.h"

namespace torch::autograd {
struct FunctionPreHook;
struct Node;
}  // namespace torch::autograd

namespace penstock::engine {

// Returns true inside a backward, also while activation checkpointing recomputes a forward in it.
bool in_backward();

// Returns true inside torch.autograd.grad(), which returns gradients and accumulates none.
bool in_side_backward();

// Runs `done` when the outermost backward in progress has ended without an error.
void at_end_of_backward(std::function<void()> done);

// A place in the graph that a thread recorded. A backward reaches the nodes of one thread in
// reverse order.
struct GraphPlace {
  uint64_t thread = 0, number = 0;

  bool operator==(const GraphPlace&) const = default;
  // Returns whether the node at this place was recorded after `since`. Places of different threads
  // have no order.
  bool follows(const GraphPlace& since) const {
    return thread == since.thread && number >= since.number;
  }
};

// Returns the place of a node.
GraphPlace place_of(const torch::autograd::Node& node);

// Returns the place of the next node that this thread records.
GraphPlace now();

// Returns the place of the node whose backward runs in this thread; if none runs, GraphPlace{}.
GraphPlace in_graph();

// When the backward reaches one of `outputs`, runs `before` with the place of that output's node.
// Skips outputs without a gradient. Also skips outputs older than `since` (a result of now()),
// because a unit may return its own input.
void before_backward_of(const std::vector<at::Tensor>& outputs, const GraphPlace& since,
                        const std::function<void(const GraphPlace&)>& before);

// Returns whether before_backward_of() added this hook to a node.
bool is_unit_hook(const torch::autograd::FunctionPreHook& hook);

// Returns whether each of `outputs` is an embedding lookup. The backward of a lookup reads no
// parameter.
bool only_looked_up(const std::vector<at::Tensor>& outputs);

// Runs `taken` each time autograd has accumulated into a leaf's .grad. The hook is removed with
// this object. Move-only.
class GradientHook {
 public:
  GradientHook(const at::Tensor& leaf, std::function<void()> taken);
  GradientHook(GradientHook&& other) noexcept = default;
  GradientHook& operator=(GradientHook&&) = delete;
  ~GradientHook();
  // Returns whether the backward in progress may accumulate into the leaf.
  bool expected() const;
  // Moves the hook if the leaf got another accumulator (for example by Tensor.set_()).
  void follow();

 private:
  void install();
  void remove();

  at::Tensor leaf_;
  std::function<void()> taken_;
  device::NodePtr accumulator_;  // kept alive here: a tensor has only a weak reference to it
  uintptr_t key_ = 0;
};

}  // namespace penstock::engine
