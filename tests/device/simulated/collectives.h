#pragma once
// Collectives with the stream semantics of NCCL's backend, over a backend for host tensors.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tests/device/simulated/control.h"

namespace penstock::sim {

// A collective is a kernel on a stream of the backend's own, one for each device, that starts after
// what the caller's current stream has been given: the call returns before anything has moved, and
// Work::wait() makes the current stream wait, not the host. The low-precision sums are the inner
// backend's.
PENSTOCK_SIM_API c10::intrusive_ptr<c10d::Backend> make_collectives(
    c10::intrusive_ptr<c10d::Backend> inner);

}  // namespace penstock::sim
