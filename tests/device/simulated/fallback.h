#pragma once
// Runs an operator that has no kernel for this device: queues the CPU's kernel on the stream, over
// the device's memory. The host waits only if it cannot predict the shapes of the results.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace penstock::sim {

void run_on_device(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

}  // namespace penstock::sim
