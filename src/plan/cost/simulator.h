#pragma once
// The simulator: what a plan costs, before it runs. The memory ledger, `penstock plan` and what
// `"offload": "auto"` chooses come from this one function.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/plan/plan.h"

namespace penstock {

inline constexpr int kNumTiers = 3;

// Bytes on one rank. `buffers` are what collectives receive into, pack, and keep between passes.
struct MemoryPeak {
  int64_t param = 0, grad = 0, optim = 0, buffers = 0;  // each one's own peak
  int64_t total = 0;                                    // peak of the sum
};

struct Ledger {
  std::array<MemoryPeak, kNumTiers> tier;  // by Tier
  int64_t in_memory = 0;                   // peak of device and host together
  // Bytes this rank sends in one training step: phase ("forward" "backward" "update") -> link
  // ("node" crosses nodes, "local" inside one, "pipeline" between stages, "device-host",
  // "host-disk") -> bytes.
  std::map<std::string, std::map<std::string, int64_t>> sent;
  int64_t exchanges = 0;  // with peers, in one training step
  std::string text() const;
};

Ledger simulate(const Plan& step, const Table& table, const ModelDesc& model, const Mesh& mesh,
                double moments_per_param = 2.0);

// Of each line: link -> bytes, as in Ledger::sent.
using LineBytes = std::vector<std::map<std::string, int64_t>>;
LineBytes bytes_by_line(const Plan& step, const Table& table, const ModelDesc& model,
                        const Mesh& mesh);

}  // namespace penstock
