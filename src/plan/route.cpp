#include "src/plan/route.h"

#include <algorithm>

namespace penstock {

namespace {

PassKind pass_kind(MoveKind kind) {
  switch (kind) {
    case MoveKind::kAllGather:
      return PassKind::kAllGather;
    case MoveKind::kReduceScatter:
      return PassKind::kReduceScatter;
    case MoveKind::kAllReduce:
      return PassKind::kAllReduce;
    case MoveKind::kSlice:
    case MoveKind::kCopy:
    case MoveKind::kCast:
    case MoveKind::kAllToAll:
    case MoveKind::kShift:
      break;
  }
  return PassKind::kLocal;
}

// Records this rank's part of a cut over the axes.
void cut(Pass& pass, const std::vector<Axis>& axes, const Mesh& mesh, int rank) {
  pass.axes.insert(pass.axes.end(), axes.begin(), axes.end());
  for (const Axis axis : kShardOrder) {
    if (std::find(axes.begin(), axes.end(), axis) == axes.end()) continue;
    pass.parts *= mesh.size(axis);
    pass.part = pass.part * mesh.size(axis) + mesh.coordinate(rank, axis);
  }
}

// Returns whether the last pass can include this move ([Note: Fusions]).
bool joins(const std::vector<Pass>& passes, const Move& move) {
  if (passes.empty() || move.is_collective()) return false;
  if (passes.back().kind == PassKind::kLocal) return true;
  return passes.back().kind == PassKind::kReduceScatter && move.kind != MoveKind::kSlice;
}

// Values between two sums are fp32. A sum in place keeps the dtype of its buffer.
void widen_between_sums(std::vector<Pass>& passes) {
  const Placement wanted = passes.back().to;
  for (size_t i = 0; i < passes.size(); ++i) {
    if (i > 0) passes[i].from.dtype = passes[i - 1].to.dtype;
    const bool more = std::any_of(passes.begin() + static_cast<std::ptrdiff_t>(i) + 1, passes.end(),
                                  [](const Pass& pass) { return pass.sums(); });
    if (more && passes[i].sums()) passes[i].to.dtype = Dtype::kFp32;
    if (passes[i].kind == PassKind::kAllReduce) passes[i].to.dtype = passes[i].from.dtype;
  }
  if (passes.back().to != wanted) {
    passes.push_back({PassKind::kLocal, {}, passes.back().to, wanted});
  }
}

}  // namespace

bool Route::in_place() const {
  return std::all_of(passes.begin(), passes.end(),
                     [](const Pass& pass) { return pass.kind == PassKind::kAllReduce; });
}

bool Route::local() const {
  return std::all_of(passes.begin(), passes.end(),
                     [](const Pass& pass) { return pass.kind == PassKind::kLocal; });
}

bool Route::only_reads() const {
  return from.tier == Tier::kDisk && to.tier != Tier::kDisk && from.layout == to.layout &&
         from.dtype == to.dtype && local();
}

bool Route::into_next(size_t pass) const {
  if (pass + 1 == passes.size() || passes[pass + 1].kind != PassKind::kAllGather) return false;
  if (passes[pass + 1].wire.delta) return false;
  return passes[pass].kind == PassKind::kLocal || passes[pass].wire.delta;
}

bool Route::ends_at(size_t pass) const {
  return std::all_of(passes.begin() + static_cast<std::ptrdiff_t>(pass) + 1, passes.end(),
                     [](const Pass& later) { return later.kind == PassKind::kAllReduce; });
}

bool Route::joins_update() const {
  if (passes.empty() || passes[0].kind != PassKind::kLocal || !passes[0].axes.empty()) return false;
  return to.tier != Tier::kDisk && (passes.size() == 1 || (passes.size() == 2 && into_next(0)));
}

Dtype Route::dtype_after(size_t pass, Dtype first, Dtype last) const {
  const Dtype dtype = passes[pass].to.dtype;
  if (pass + 1 == passes.size() || (dtype == to.dtype && dtype != from.dtype)) return last;
  return dtype == from.dtype ? first : Dtype::kFp32;
}

std::optional<size_t> residual_pass(const Route& route, const Placement& rest) {
  const auto each_axis = [](const auto& holds) {
    return std::all_of(kDataAxes.begin(), kDataAxes.end(), holds);
  };
  const bool completes = each_axis([&](Axis axis) {
    return rest.on(axis) != Layout::kPartial || route.to.on(axis) != Layout::kPartial;
  });
  const bool lossy = std::any_of(route.passes.begin(), route.passes.end(),
                                 [](const Pass& pass) { return pass.sums() && pass.wire.lossy(); });
  for (size_t i = 0; i < route.passes.size(); ++i) {
    const Pass& pass = route.passes[i];
    if (!pass.sums() || pass.wire.lossy() != lossy) continue;
    // If no sum is lossy and the route completes all partial sums of the residual, a plain sum may
    // also add up the axes over which the residual is sharded.
    const bool fits = each_axis([&](Axis axis) {
      const bool sums_too = rest.on(axis) == Layout::kSharded && !lossy && completes;
      return pass.from.on(axis) == rest.on(axis) ||
             (sums_too && pass.from.on(axis) == Layout::kPartial);
    });
    if (fits) return i;
  }
  return {};
}

Route route(const Placement& from, const std::vector<Move>& moves, const Mesh& mesh, int rank,
            bool consumes) {
  Route route{from, from, {}};
  std::vector<Pass>& passes = route.passes;
  for (const Move& move : moves) {
    const Placement next = apply(route.to, move);
    const PassKind kind = pass_kind(move.kind);
    // An all_reduce overwrites the buffer of its source. If the source must survive, it is copied
    // first.
    if (!consumes && passes.empty() && kind == PassKind::kAllReduce) {
      passes.push_back({PassKind::kLocal, {}, from, from});
    }
    if (!joins(passes, move)) {
      const bool collective = kind != PassKind::kLocal;
      passes.push_back({kind, collective ? move.axes : std::vector<Axis>{}, route.to, next});
      passes.back().wire = move.wire;
    }
    passes.back().to = next;
    if (move.kind == MoveKind::kSlice) cut(passes.back(), move.axes, mesh, rank);
    route.to = next;
  }
  if (!passes.empty()) widen_between_sums(passes);
  return route;
}

}  // namespace penstock
