#pragma once
// Every operator without a kernel of its own: the CPU's kernel, on the stream, over the device's
// memory. The host does not wait for it where the results' shapes can be known before.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace penstock::sim {

void run_on_device(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

}  // namespace penstock::sim
