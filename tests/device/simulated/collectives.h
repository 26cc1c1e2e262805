#pragma once
// Collectives with the stream semantics of NCCL's backend, over a backend for host tensors.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tests/device/simulated/control.h"

namespace penstock::sim {

// A collective is a kernel on the backend's own stream (one per device). It starts after the work
// that was queued on the caller's current stream. The call returns before any data has moved, and
// Work::wait() makes the current stream wait, not the host. The inner backend computes the
// low-precision sums.
PENSTOCK_SIM_API c10::intrusive_ptr<c10d::Backend> make_collectives(
    c10::intrusive_ptr<c10d::Backend> inner);

}  // namespace penstock::sim
