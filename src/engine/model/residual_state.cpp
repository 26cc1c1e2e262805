#include "src/engine/model/residual_state.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "src/base/text.h"

namespace penstock::engine {

namespace {

using ckpt::StatePiece;

bool has_residuals(const ckpt::Manifest& manifest) {
  return std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                     [](const ckpt::Tensor& one) { return one.role == kResidualRole; });
}

at::Tensor piece_of(const ResidualPart& part, const StatePiece& piece) {
  return part.values.narrow(0, piece.at - part.holding.first, piece.numel);
}

}  // namespace

double residual_divisor(const Config& config) {
  const bool adds = config.batch.reduction == "sum";
  return adds ? 1.0 : static_cast<double>(config.batch.accumulate);
}

std::unique_ptr<ResidualPart> ResidualState::part(int unit, exec::Flat& flat,
                                                  at::Tensor values) const {
  auto made = std::make_unique<ResidualPart>();
  made->flat = &flat;
  made->values = std::move(values);
  made->shape.numel = made->values.numel();
  made->shape.tier = Tier::kHost;
  ckpt::Holding& holding = made->holding;
  holding.unit = unit;
  holding.flat = &flat;
  holding.buffer = &made->shape;
  holding.place = executor_.values().residuals().saved();
  holding.role = kResidualRole;
  holding.first = shard_index(holding.place, executor_.mesh(), rank_) * made->shape.numel;
  return made;
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

ResidualParts ResidualState::parts() const {
  ResidualParts found;
  const std::vector<std::pair<int, exec::Flat*>> all = flats();
  if (!executor_.values().residuals().used()) return found;
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
    found.push_back(part(unit, *flat, executor_.values().residuals().mean(*flat, label)));
  }
  // The stages that share a weight exchange its residual. All stages follow one order of weights.
  std::vector<const ResidualPart*> in_order;
  for (const auto& one : found) in_order.push_back(one.get());
  std::sort(in_order.begin(), in_order.end(), [](const auto* one, const auto* other) {
    return one->flat->slots.front().number < other->flat->slots.front().number;
  });
  for (const ResidualPart* one : in_order) {
    executor_.values().residuals().add_holders(*one->flat, one->values, "add residuals");
  }
  for (const auto& one : found) one->values.div_(divisor_);
  return found;
}

std::vector<ckpt::Extra> ResidualState::to_save(const ckpt::GlobalOf& names) const {
  std::vector<ckpt::Extra> extras;
  for (const auto& one : parts()) {
    const auto [from, to] = ckpt::share_of(one->holding, executor_.mesh(), rank_);
    const int64_t first = one->holding.first;
    for (const StatePiece& piece : ckpt::pieces(one->holding, first + from, to - from, names)) {
      if (piece.numel == 0) continue;
      extras.push_back({kResidualRole, piece.global, -1, piece_of(*one, piece)});
    }
  }
  return extras;
}

ResidualParts ResidualState::to_fill(const ckpt::Manifest& manifest) const {
  ResidualParts found;
  if (!has_residuals(manifest)) return found;
  for (const auto& [unit, flat] : flats()) {
    const int64_t shards = num_shards(executor_.values().residuals().saved(), executor_.mesh());
    found.push_back(
        part(unit, *flat, at::zeros({flat->numel / shards}, at::TensorOptions(at::kFloat))));
  }
  return found;
}

std::vector<ckpt::Extra> ResidualState::wanted(const ResidualParts& parts,
                                               const ckpt::Manifest& manifest,
                                               const ckpt::GlobalOf& names) const {
  std::vector<ckpt::Extra> extras;
  for (const auto& one : parts) {
    const ckpt::Holding& holding = one->holding;
    for (const StatePiece& piece : ckpt::pieces(holding, holding.first, holding.numel(), names)) {
      const std::string key = concat(kResidualRole, "/", piece.global.name);
      if (piece.numel == 0 || manifest.find(key) == nullptr) continue;
      extras.push_back({kResidualRole, piece.global, -1, piece_of(*one, piece)});
    }
  }
  return extras;
}

bool ResidualState::loses(const ckpt::Manifest& manifest) const {
  return has_residuals(manifest) && !executor_.values().residuals().used();
}

void ResidualState::take(const ResidualParts& parts) const {
  for (exec::UnitState& unit : executor_.units()) {
    for (exec::Flat& flat : unit.flats) {
      const auto found = std::find_if(parts.begin(), parts.end(),
                                      [&](const auto& one) { return one->flat == &flat; });
      const bool has = found != parts.end();
      executor_.values().residuals().set_mean(flat,
                                              has ? (*found)->values.mul(divisor_) : at::Tensor());
    }
  }
}

}  // namespace penstock::engine
