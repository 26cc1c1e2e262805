#include "src/engine/model/flat_state.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "src/base/text.h"

namespace penstock::engine {

namespace {

using ckpt::StatePiece;

at::Tensor piece_of(const FlatPart& part, const StatePiece& piece) {
  return part.values.narrow(0, piece.at - part.holding.first, piece.numel);
}

}  // namespace

std::unique_ptr<FlatPart> part_of(int unit, exec::Flat& flat, at::Tensor values,
                                  const Placement& place, int shard, const char* role) {
  auto made = std::make_unique<FlatPart>();
  made->flat = &flat;
  made->values = std::move(values);
  made->shape.numel = made->values.numel();
  made->shape.tier = Tier::kHost;
  ckpt::Holding& holding = made->holding;
  holding.unit = unit;
  holding.flat = &flat;
  holding.buffer = &made->shape;
  holding.place = place;
  holding.role = role;
  holding.first = shard * made->shape.numel;
  return made;
}

void add_saved(const FlatParts& parts, const Mesh& mesh, int rank, const ckpt::GlobalOf& names,
               std::vector<ckpt::Extra>* extras) {
  for (const auto& one : parts) {
    const auto [from, to] = ckpt::share_of(one->holding, mesh, rank);
    const int64_t first = one->holding.first;
    for (const StatePiece& piece : ckpt::pieces(one->holding, first + from, to - from, names)) {
      if (piece.numel == 0) continue;
      extras->push_back({one->holding.role, piece.global, -1, piece_of(*one, piece)});
    }
  }
}

std::vector<ckpt::Extra> to_read(const FlatParts& parts, const ckpt::Manifest& manifest,
                                 const ckpt::GlobalOf& names) {
  std::vector<ckpt::Extra> extras;
  for (const auto& one : parts) {
    const ckpt::Holding& holding = one->holding;
    for (const StatePiece& piece : ckpt::pieces(holding, holding.first, holding.numel(), names)) {
      const std::string key = concat(holding.role, "/", piece.global.name);
      if (piece.numel == 0 || manifest.find(key) == nullptr) continue;
      extras.push_back({holding.role, piece.global, -1, piece_of(*one, piece)});
    }
  }
  return extras;
}

void say_lost(const std::string& path, const ckpt::Manifest& manifest, bool keeps_residuals,
              bool makes_outer_steps) {
  const auto say = [&](const char* what) {
    std::fprintf(stderr, "penstock: checkpoint \"%s\" has %s, so they are lost\n", path.c_str(),
                 what);
  };
  if (!keeps_residuals && has_role(manifest, kResidualRole)) {
    say("residuals (rounding errors that a later sum of gradients adds), and this run has no "
        "table.residual.rest");
  }
  if (!makes_outer_steps && has_role(manifest, kOuterRole)) {
    say("momenta of outer steps, and this run makes none");
  }
}

bool has_role(const ckpt::Manifest& manifest, const std::string& role) {
  return std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                     [&](const ckpt::Tensor& one) { return one.role == role; });
}

}  // namespace penstock::engine
