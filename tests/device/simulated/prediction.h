#pragma once
// Predicts the results of an operator on meta tensors, before the operator runs.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <string>

namespace penstock::sim {

// Properties of an operator. There is one object for each operator that was called; it is never
// freed.
struct Operator {
  std::string name;
  // True if it draws random numbers: from its generator argument or, if that is -1, from the CPU's
  // default generator.
  bool random = false;
  int generator_argument = -1;
  // Results 1 and 2 are the statistics of a norm.
  bool gives_statistics = false;
  // Its kernel resizes the out arguments while it runs, which memory of a fixed size does not
  // allow.
  bool resizes_outputs = false;
  // Accepts host tensors of any shape together with device tensors.
  bool takes_host_tensors = false;
  // Its kernel must run before the host knows the shapes of the results.
  std::atomic<bool> synchronous{false};
};

Operator& describe(const c10::OperatorHandle& handle);

// Returns the operator's results as meta tensors, in order; None for a result that aliases an
// argument. Resizes out arguments that have another size. Results are cached by the properties of
// the arguments, because meta kernels that are written in Python are slow. Returns nullopt if this
// operator must run synchronously, now and in all later calls. Throws the meta kernel's error for
// wrong arguments.
std::optional<torch::jit::Stack> predict(const c10::OperatorHandle& handle, Operator& known,
                                         const torch::jit::Stack& arguments);

}  // namespace penstock::sim
