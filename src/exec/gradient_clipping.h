#pragma once
#include <algorithm>

namespace penstock::exec {

// Returns the factor by which an update multiplies gradients: 1 / `divisor`, reduced if their
// global `norm` (after the division) exceeds `clip`. A `clip` of 0 never reduces. The formula is
// that of torch.nn.utils.clip_grad_norm_.
inline double gradient_scale(double divisor, double norm, double clip) {
  const double scale = 1.0 / divisor;
  if (clip > 0.0) return scale * std::min(1.0, clip / (norm + 1e-6));
  return scale;
}

}  // namespace penstock::exec
