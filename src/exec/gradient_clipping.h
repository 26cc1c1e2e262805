#pragma once
#include <algorithm>

namespace penstock::exec {

// Returns the factor by which an update multiplies gradients. It is 1 / `divisor`, or less if the
// global `norm` of the divided gradients exceeds `clip`. If `clip` is 0, nothing is clipped.
// torch.nn.utils.clip_grad_norm_ uses the same formula.
inline double gradient_scale(double divisor, double norm, double clip) {
  const double scale = 1.0 / divisor;
  if (clip > 0.0) return scale * std::min(1.0, clip / (norm + 1e-6));
  return scale;
}

}  // namespace penstock::exec
