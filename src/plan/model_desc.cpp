#include "src/plan/model_desc.h"

#include <algorithm>

namespace penstock {

std::string LayerExchange::text() const { return Move{.kind = kind, .axes = {axis}}.text(); }

std::pair<int64_t, int64_t> range_of(const Chunk& chunk, int64_t numel) {
  if (chunk.count == 1) return {0, numel};
  // A grain is a whole number of disk blocks in any dtype.
  const int64_t grains = (numel + kChunkGrain - 1) / kChunkGrain;
  const int64_t size = (grains + chunk.count - 1) / chunk.count * kChunkGrain;
  return {std::min(numel, chunk.index * size), std::min(numel, (chunk.index + 1) * size)};
}

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
