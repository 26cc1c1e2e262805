#pragma once
// Collectives with the stream semantics of NCCL's backend, over a backend for host tensors.
#include <functional>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "tests/device/simulated/control.h"

namespace penstock::sim {

// A collective is a kernel on the backend's own stream (one per device). It starts after the work
// that was queued on the caller's current stream. The call returns before any data has moved, and
// Work::wait() makes the current stream wait, not the host. The inner backend computes the
// low-precision sums.
// `make` makes the inner backend and may wait for the other ranks. Like NCCL, the backend calls it
// in its first collective, or when it is told to connect, and not when it is made.
using MakeInner = std::function<c10::intrusive_ptr<c10d::Backend>()>;
PENSTOCK_SIM_API c10::intrusive_ptr<c10d::Backend> make_collectives(int rank, int size,
                                                                    MakeInner make);

}  // namespace penstock::sim
