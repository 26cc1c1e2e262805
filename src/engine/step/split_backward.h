#pragma once
// SplitBackward: a backward in two parts ([Note: Zero bubble]). The first part computes the
// gradients of a graph's inputs, the second one those of all other leaves (weights).
//
// [Note: Boundary nodes] A node is on the path if the gradients of the inputs need it. The
// gradients of the weights leave the path at boundary nodes: nodes on the path with an edge to a
// node off the path. The first part keeps the gradients that arrive at boundary nodes. The second
// part runs each boundary node again, and from there on only the nodes that lead to the weights.
// Nodes compute only the gradients that are needed, so a matrix product computes one of its two
// gradients in each part. The first part computes the weights' gradients, too, if a boundary node
// may not run twice (it is not one of torch's own operators, or it has hooks of the user's), or if
// a path leads from one boundary node of a weight to another one (the weight is used twice).
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "src/engine/step/autograd_hooks.h"

namespace penstock::engine {

class SplitBackward {
 public:
  using Tensors = std::vector<at::Tensor>;

  // `outputs` need gradients; there may be none. `gradients`: of the outputs; undefined: 1.
  // `inputs`: leaves.
  SplitBackward(Tensors outputs, Tensors gradients, Tensors inputs);
  SplitBackward(SplitBackward&& other) noexcept;
  ~SplitBackward();

  // Returns false if there are no inputs, so that the second part is a plain backward.
  bool splits() const { return !inputs_.empty() && !outputs_.empty(); }
  // Runs the first part. Nothing accumulates. Throws RuntimeFault if it must compute the gradient
  // of a weight that has a hook, which would run twice.
  void inputs();

  // Events of the second part, inside its backward.
  struct WeightEvents {
    std::function<void()> begin;  // before all others
    // Before and after the gradients of some leaves accumulate. `at`: a place in their graph.
    std::function<void(const Tensors& leaves, const GraphPlace& at)> enter;
    std::function<void(const Tensors& leaves)> leave;
  };
  // Runs the second part as one backward, with the weights used last first, and frees the graph.
  // If the backward is not split, there are no events.
  void weights(const WeightEvents& events);
  // Returns the leaves whose gradients the second part computes.
  Tensors leaves() const;

 private:
  struct Graph;
  Tensors outputs_, gradients_, inputs_;
  std::unique_ptr<Graph> graph_;  // after inputs()
};

}  // namespace penstock::engine
