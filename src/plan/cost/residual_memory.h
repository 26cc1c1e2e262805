#pragma once
// ResidualMemory: the residuals that a simulated rank holds ([Note: Residuals]). A plain value.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "src/plan/cost/memory_meter.h"
#include "src/plan/route.h"

namespace penstock {

class ResidualMemory {
 public:
  // `kept`: the residual of each unit; empty if no residuals are kept.
  ResidualMemory() = default;
  ResidualMemory(std::vector<Held> kept, Meter& meter)
      : kept_(std::move(kept)), renewed_(kept_.size()) {
    for (const Held& held : kept_) meter.add(held);
  }

  // A sum by a lossy wire leaves a new residual. The residual of the last step is kept beside it
  // until the update. Returns the bytes that move from the host to an accelerator and back.
  int64_t feed(int unit, const Route& way, Meter& meter) {
    const Held& held = kept_[static_cast<size_t>(unit)];
    const bool lossy = std::any_of(way.passes.begin(), way.passes.end(),
                                   [](const Pass& pass) { return pass.wire.lossy(); });
    if (lossy && !renewed_[static_cast<size_t>(unit)]) {
      renewed_[static_cast<size_t>(unit)] = true;
      meter.add(held);
    }
    return held.tier == Tier::kDevice ? 0 : 2 * held.bytes;
  }
  void update(Meter& meter) {
    for (size_t unit = 0; unit < renewed_.size(); ++unit) {
      if (renewed_[unit]) meter.free(kept_[unit]);
      renewed_[unit] = false;
    }
  }

 private:
  std::vector<Held> kept_;
  std::vector<bool> renewed_;
};

}  // namespace penstock
