#pragma once
// The simulator: predicts the cost of a plan. The memory ledger, `penstock plan` and the choices of
// `"offload": "auto"` all come from simulate().
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/plan/plan.h"

namespace penstock {

inline constexpr int kNumTiers = 3;

// Bytes on one rank. `buffers` are receive buffers of collectives, packed pieces, and values kept
// between passes.
struct MemoryPeak {
  int64_t param = 0, grad = 0, optim = 0, buffers = 0;  // each has its own peak
  int64_t total = 0;                                    // peak of the sum
};

// Peak bytes of the tensors with which the model computes, and of these tensors together with the
// engine's memory on the device, and in device and host. If their sizes are not known yet, `own` is
// 0 ([Note: Memory of activations]).
struct TensorPeak {
  int64_t own = 0, device = 0, in_memory = 0;
};

struct Ledger {
  std::array<MemoryPeak, kNumTiers> tier;  // by Tier
  int64_t in_memory = 0;                   // peak of device and host together
  TensorPeak tensors;
  // Bytes that this rank sends in one training step: phase ("forward" "backward" "update") -> link
  // -> bytes. Links: "node" (between nodes), "local" (inside a node), "pipeline" (between stages),
  // "device-host", "host-disk".
  std::map<std::string, std::map<std::string, int64_t>> sent;
  // The part of `sent` for which computing waits: exchanges of layers.
  std::map<std::string, std::map<std::string, int64_t>> waited;
  // Values that this rank encodes and decodes for lossy wires in one step: phase -> number.
  std::map<std::string, int64_t> coded;
  int64_t exchanges = 0;  // number of exchanges with peers in a step, except those of layers
  std::string text() const;
};

struct SimulatedUpdate {
  double moments_per_param = 2.0;
  bool late_update = false;  // the update continues during the next forward (offload.late_update)
  bool external = false;     // the user's own optimizer
};

// [Note: Steady peaks] The last chunks of an update are still being written to disk when the next
// step begins, and a late update continues during that step's forward. So peaks are taken over
// two steps in a row. If the plan is only a part of a step, it is simulated once. `sent` and
// `exchanges` are those of one step.
Ledger simulate(const Plan& step, const Table& table, const ModelDesc& model, const Mesh& mesh,
                const SimulatedUpdate& update = {});

// By plan line: link -> bytes, as in Ledger::sent.
using LineBytes = std::vector<std::map<std::string, int64_t>>;
LineBytes bytes_by_line(const Plan& step, const Table& table, const ModelDesc& model,
                        const Mesh& mesh);

}  // namespace penstock
