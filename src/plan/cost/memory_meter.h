#pragma once
// Meter: the bytes that a simulated rank holds, by tier and use, and their peaks. A plain value.
#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <utility>

#include "penstock/error.h"
#include "src/plan/cost/simulator.h"

namespace penstock {

enum class Use : uint8_t { kParam, kGrad, kOptim, kBuffers };
inline constexpr int kNumUses = 4;

struct Held {
  Tier tier;
  Use use;
  int64_t bytes;
  int unit = -1;  // the unit of parameters that are being written to disk
};

using Bytes = std::array<std::array<int64_t, kNumUses>, kNumTiers>;  // by Tier, then by Use

// Raises each entry of `most` to the same entry of `other` if that is larger.
inline void raise(Bytes& most, const Bytes& other) {
  for (size_t tier = 0; tier < most.size(); ++tier) {
    for (size_t use = 0; use < most[tier].size(); ++use) {
      most[tier][use] = std::max(most[tier][use], other[tier][use]);
    }
  }
}

// Current bytes and their peaks.
class Meter {
 public:
  void add(const Held& held) {
    int64_t& now = now_[static_cast<size_t>(held.tier)][static_cast<size_t>(held.use)];
    now += held.bytes;
    PENSTOCK_ASSERT(now >= 0, "more bytes freed than held");
    MemoryPeak& peak = peaks[static_cast<size_t>(held.tier)];
    int64_t* const by_use[kNumUses] = {&peak.param, &peak.grad, &peak.optim, &peak.buffers};
    int64_t& own = *by_use[static_cast<size_t>(held.use)];
    own = std::max(own, now);
    total_now_[static_cast<size_t>(held.tier)] += held.bytes;
    peak.total = std::max(peak.total, total_now_[static_cast<size_t>(held.tier)]);
    raise(lately_, now_);
    if (held.tier == Tier::kDisk) return;
    in_memory_now_ += held.bytes;
    in_memory = std::max(in_memory, in_memory_now_);
    raise_tensors(0);
  }
  void free(const Held& held) { add({held.tier, held.use, -held.bytes}); }
  // Adds what the model's own tensors take on the device at the visit of a unit. The stretches of
  // a unit are sums over all its visits in a forward or backward, so the first visit adds them.
  void compute(const Step& visit, const UnitTensors& own) {
    if (!gives_gradient(visit.mark)) return;
    const std::pair pass(visit.op, visit.micro);
    if (std::exchange(pass_, pass) != pass) added_.clear();
    const bool forward = visit.op == Op::kForward;
    const int unit = visit.units.front();
    if (visit.mark != Mark::kEnd && added_.insert({unit, false}).second) {
      add(forward ? own.forward_begin : own.backward_begin);
    }
    if (visit.mark != Mark::kBegin && added_.insert({unit, true}).second) {
      add(forward ? own.forward_end : own.backward_end);
    }
  }
  void end_tensors() { tensors_now_ = 0; }

  const Bytes& now() const { return now_; }
  // Returns the peak of each entry since the last call.
  Bytes lately() { return std::exchange(lately_, now_); }

  std::array<MemoryPeak, kNumTiers> peaks{};
  int64_t in_memory = 0;  // peak of device and host together
  TensorPeak tensors;

 private:
  // Stretches that were measured in one micro-batch may free more than another one took.
  void add(const TensorStretch& stretch) {
    raise_tensors(stretch.over);
    tensors_now_ = std::max<int64_t>(0, tensors_now_ + stretch.change);
    raise_tensors(0);
  }
  void raise_tensors(int64_t over) {
    const int64_t now = tensors_now_ + over;
    tensors.own = std::max(tensors.own, now);
    tensors.device = std::max(tensors.device, now + total_now_[static_cast<size_t>(Tier::kDevice)]);
    tensors.in_memory = std::max(tensors.in_memory, now + in_memory_now_);
  }

  Bytes now_{}, lately_{};
  std::array<int64_t, kNumTiers> total_now_{};
  int64_t in_memory_now_ = 0, tensors_now_ = 0;
  std::pair<Op, int> pass_{Op::kForward, kNoMicro};  // whose visits come: direction, micro-batch
  std::set<std::pair<int, bool>> added_;             // in this pass: unit, whether at its end
};

}  // namespace penstock
