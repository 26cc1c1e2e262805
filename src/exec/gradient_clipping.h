#pragma once
#include <algorithm>

namespace penstock::exec {

// Returns the factor by which an update multiplies gradients: 1 / `divisor`, reduced if their
// global `norm` (after the division) exceeds `clip`. If `clip` is 0, the factor is not reduced.
// torch.nn.utils.clip_grad_norm_ uses the same formula.
inline double gradient_scale(double divisor, double norm, double clip) {
  const double scale = 1.0 / divisor;
  if (clip > 0.0) return scale * std::min(1.0, clip / (norm + 1e-6));
  return scale;
}

}  // namespace penstock::exec
