#include "src/engine/model/residual_state.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
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
  holding.place = executor_.residuals().saved();
  holding.role = kResidualRole;
  holding.first = shard_index(holding.place, executor_.mesh(), rank_) * made->shape.numel;
  return made;
}

ResidualParts ResidualState::parts() const {
  ResidualParts found;
  if (!executor_.table().keeps_residual()) return found;
  std::vector<exec::UnitState>& units = executor_.units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (exec::Flat& flat : units[unit].flats) {
      if (!flat.trainable) continue;
      at::Tensor mean = executor_.residuals().mean(flat, concat("read u", unit, " residual"));
      if (!mean.defined()) continue;
      found.push_back(part(static_cast<int>(unit), flat, mean.div_(divisor_)));
    }
  }
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

ResidualParts ResidualState::to_fill(
    const ckpt::Manifest& manifest) const {
  ResidualParts found;
  if (!has_residuals(manifest) || !executor_.table().keeps_residual()) return found;
  const int64_t shards = num_shards(executor_.residuals().saved(), executor_.mesh());
  std::vector<exec::UnitState>& units = executor_.units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (exec::Flat& flat : units[unit].flats) {
      if (!flat.trainable) continue;
      found.push_back(part(static_cast<int>(unit), flat,
                           at::zeros({flat.numel / shards}, at::TensorOptions(at::kFloat))));
    }
  }
  return found;
}

std::vector<ckpt::Extra> ResidualState::wanted(
    const ResidualParts& parts, const ckpt::Manifest& manifest,
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
  return has_residuals(manifest) && !executor_.table().keeps_residual();
}

void ResidualState::take(const ResidualParts& parts) const {
  for (exec::UnitState& unit : executor_.units()) {
    for (exec::Flat& flat : unit.flats) {
      const auto found = std::find_if(parts.begin(), parts.end(),
                                      [&](const auto& one) { return one->flat == &flat; });
      const bool has = found != parts.end();
      executor_.residuals().set_mean(flat, has ? (*found)->values.mul(divisor_) : at::Tensor());
    }
  }
}

}  // namespace penstock::engine
