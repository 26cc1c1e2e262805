#pragma once
// What an operator will give, found on meta tensors before it runs.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <string>

namespace penstock::sim {

// What there is to know of an operator; kept for good, one for each that was called.
struct Operator {
  std::string name;
  // Draws random numbers; from its generator argument, or else (-1) from the CPU's default one.
  bool random = false;
  int generator_argument = -1;
  // Results 1 and 2 are the statistics of a norm.
  bool gives_statistics = false;
  // Its out arguments have other sizes on the way, which memory of a fixed size cannot.
  bool resizes_outputs = false;
  // Takes host tensors of any shape beside those of the device.
  bool takes_host_tensors = false;
  // Its kernel has to run before the host knows what it gives.
  std::atomic<bool> synchronous{false};
};

Operator& describe(const c10::OperatorHandle& handle);

// The operator's results as meta tensors, by return; those that alias an argument are None. Resizes
// out arguments of another size. Remembered by what the arguments look like, as meta kernels that
// are written in Python are slow. nullopt: it must run synchronously, now and from now on. Throws
// what the meta kernel says of wrong arguments.
std::optional<torch::jit::Stack> predict(const c10::OperatorHandle& handle, Operator& known,
                                         const torch::jit::Stack& arguments);

}  // namespace penstock::sim
