#include "src/plan/model_desc.h"

namespace penstock {

void assume_order(ModelDesc& model, bool root) {
  model.forward.clear();
  model.backward.clear();
  const int num_units = static_cast<int>(model.units.size());
  const int first = root ? 1 : 0;
  if (root) {
    model.forward.push_back({0, Mark::kBegin});
    model.backward.push_back({0, Mark::kBegin});
  }
  for (int unit = first; unit < num_units; ++unit) {
    model.forward.push_back({unit, Mark::kWhole});
    model.backward.push_back({num_units - 1 - unit + first, Mark::kWhole});
  }
  if (root) {
    model.forward.push_back({0, Mark::kEnd});
    model.backward.push_back({0, Mark::kEnd});
  }
}

}  // namespace penstock
