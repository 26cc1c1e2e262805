#include "src/engine/model/residual_state.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "src/base/text.h"

namespace penstock::engine {

double residual_divisor(const Config& config) {
  const bool adds = config.batch.reduction == "sum";
  return adds ? 1.0 : static_cast<double>(config.batch.accumulate);
}

// Returns the trained flats of this rank, by unit.
std::vector<std::pair<int, exec::Flat*>> ResidualState::flats() const {
  std::vector<std::pair<int, exec::Flat*>> found;
  if (!executor_.values().residuals().used()) return found;
  std::vector<exec::UnitState>& units = executor_.units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (exec::Flat& flat : units[unit].flats) {
      if (flat.trainable) found.emplace_back(static_cast<int>(unit), &flat);
    }
  }
  return found;
}

FlatParts ResidualState::parts() const {
  FlatParts found;
  const std::vector<std::pair<int, exec::Flat*>> all = flats();
  if (!executor_.values().residuals().used()) return found;
  const Placement place = executor_.values().residuals().saved();
  // A residual may be zero on some ranks only.
  std::string mine;
  for (const auto& [unit, flat] : all) mine += flat->residual.kept.memory ? '1' : '0';
  const std::vector<std::string> theirs = executor_.share("residuals", mine, /*in_stage=*/true);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& [unit, flat] = all[i];
    const bool exists = std::any_of(theirs.begin(), theirs.end(),
                                    [&](const std::string& one) { return one[i] == '1'; });
    if (!exists && !flat->placement.is_partial(Axis::kPipeline)) continue;
    const std::string label = concat("read u", unit, " residual");
    found.push_back(part_of(unit, *flat, executor_.values().residuals().mean(*flat, label), place,
                            shard_index(place, flat->placement.mesh(executor_.mesh()), rank_),
                            kResidualRole));
  }
  // The stages that share a weight exchange its residual. All stages follow one order of weights.
  std::vector<const FlatPart*> in_order;
  for (const auto& one : found) in_order.push_back(one.get());
  std::sort(in_order.begin(), in_order.end(), [](const auto* one, const auto* other) {
    return one->flat->slots.front().number < other->flat->slots.front().number;
  });
  for (const FlatPart* one : in_order) {
    executor_.values().residuals().add_holders(*one->flat, one->values, "add residuals");
  }
  for (const auto& one : found) one->values.div_(divisor_);
  return found;
}

FlatParts ResidualState::to_fill(const ckpt::Manifest& manifest) const {
  FlatParts found;
  if (!has_role(manifest, kResidualRole)) return found;
  const Placement place = executor_.values().residuals().saved();
  for (const auto& [unit, flat] : flats()) {
    const Mesh mesh = flat->placement.mesh(executor_.mesh());
    const int64_t numel = flat->numel / num_shards(place, mesh);
    found.push_back(part_of(unit, *flat, at::zeros({numel}, at::TensorOptions(at::kFloat)), place,
                            shard_index(place, mesh, rank_), kResidualRole));
  }
  return found;
}

bool ResidualState::used() const { return executor_.values().residuals().used(); }

void ResidualState::take(const FlatParts& parts) const {
  for (exec::UnitState& unit : executor_.units()) {
    for (exec::Flat& flat : unit.flats) {
      const auto found = std::find_if(parts.begin(), parts.end(), [&](const auto& one) {
        return one->flat == &flat && one->holding.role == kResidualRole;
      });
      const bool has = found != parts.end();
      executor_.values().residuals().set_mean(flat,
                                              has ? (*found)->values.mul(divisor_) : at::Tensor());
    }
  }
}

}  // namespace penstock::engine
