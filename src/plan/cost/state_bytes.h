#pragma once
// StateBytes: the sizes of a rank's copies, and of the buffers that their moves need. A plain
// value; the model must outlive it.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "src/base/text.h"
#include "src/place/packing.h"
#include "src/plan/copies.h"
#include "src/plan/cost/memory_meter.h"
#include "src/plan/route.h"
#include "src/plan/table.h"

namespace penstock {

class StateBytes {
 public:
  StateBytes(const Table& table, const ModelDesc& model, const Mesh& mesh, double moments_per_param)
      : table_(table.on(mesh)), model_(model), mesh_(mesh), moments_per_param_(moments_per_param) {}

  const Placement& cell(Role role, Phase phase) const { return table_.at(role, phase); }

  // Returns the bytes of one unit's role under a placement. Frozen parameters have no gradient and
  // no optimizer state.
  int64_t bytes(Role role, int unit, const Placement& place, const Chunk& chunk = {}) const {
    int64_t sum = 0;
    for_each_flat(role, {unit},
                  [&](const FlatDesc& flat) { sum += bytes(role, flat, place, chunk); });
    return sum;
  }

  int64_t bytes(Role role, const FlatDesc& flat, const Placement& place,
                const Chunk& chunk = {}) const {
    const auto [begin, end] = range_of(chunk, owned(flat, place));
    const int64_t numel = end - begin;
    if (role == Role::kResidual) return numel * dtype_bytes(place.dtype);
    if (role != Role::kOptim) return penstock::buffer_bytes(dtype_in(place, flat), numel);
    const auto moments = static_cast<double>(numel * dtype_bytes(place.dtype)) * moments_per_param_;
    return static_cast<int64_t>(moments) + (table_.has_master(flat.dtype) ? numel * 4 : 0);
  }

  // Returns the number of elements of a rank's copy of the flat.
  int64_t owned(const FlatDesc& flat, const Placement& place) const {
    return flat.numel / num_shards(place, flat.placement.mesh(mesh_));
  }

  Held held(Role role, int unit, const Placement& place, const Chunk& chunk = {}) const {
    const bool of_grads = role == Role::kGrad || role == Role::kResidual;
    const Use use = role == Role::kParam ? Use::kParam : of_grads ? Use::kGrad : Use::kOptim;
    return {place.tier, use, bytes(role, unit, place, chunk)};
  }

  // The base of a unit's deltas, which is kept for the whole run.
  Held held_base(int unit) const {
    const Placement& place = cell(Role::kParam, Phase::kUpdate);
    int64_t sum = 0;
    for_each_flat(Role::kOptim, {unit}, [&](const FlatDesc& flat) {
      sum += owned(flat, place) * dtype_bytes(table_.dtype_in(place, flat.dtype));
    });
    return {place.tier, Use::kParam, sum};
  }

  // Returns whether a sum of the route adds a residual.
  bool has_residual(const Route& way) const {
    return table_.keeps_residual() &&
           residual_pass(way, cell(Role::kResidual, Phase::kRest)).has_value();
  }

  // Returns the bytes of a unit's gradient in fp32.
  int64_t wide_bytes(int unit, const Placement& place) const {
    int64_t sum = 0;
    for (const FlatDesc& flat : model_.units[unit].flats) {
      if (flat.trainable) sum += 4 * owned(flat, place);
    }
    return sum;
  }

  // Returns the bytes of the new parameters that an optimizer on the host writes before they are
  // copied to an accelerator.
  int64_t published_bytes(int unit, const Chunk& chunk) const {
    const Placement& update = cell(Role::kOptim, Phase::kUpdate);
    const Placement& rest = cell(Role::kParam, Phase::kRest);
    const bool crosses = update.tier != Tier::kDevice && rest.tier == Tier::kDevice;
    if (!model_.on_accelerator || !crosses) return 0;
    if (!joins_update(table_, route(table_.master(), table_.publish(), mesh_, 0))) return 0;
    int64_t largest = 0;
    for (const FlatDesc& flat : model_.units[unit].flats) {
      if (!flat.trainable || !table_.has_master(flat.dtype)) continue;
      const auto [begin, end] = range_of(chunk, owned(flat, update));
      largest = std::max(largest, (end - begin) * dtype_bytes(table_.dtype_in(rest, flat.dtype)));
    }
    return largest;
  }

  // Returns the bytes of a unit's largest flat of parameters.
  int64_t largest_flat(int unit, const Placement& place) const {
    int64_t largest = 0;
    for (const FlatDesc& flat : model_.units[unit].flats) {
      const int64_t bytes = penstock::buffer_bytes(dtype_in(place, flat), owned(flat, place));
      largest = std::max(largest, bytes);
    }
    return largest;
  }

  // Returns the bytes of a unit's largest quantized flat, decoded.
  int64_t largest_decoded(int unit, const Placement& place) const {
    int64_t largest = 0;
    for (const FlatDesc& flat : model_.units[unit].flats) {
      if (flat.quantized) largest = std::max(largest, owned(flat, place) * dtype_bytes(flat.dtype));
    }
    return largest;
  }

  // Returns the number of ranks of a collective over `axes` that moves the flat.
  int64_t group_size(const std::vector<Axis>& axes, const FlatDesc& flat) const {
    return flat.placement.mesh(mesh_).ranks_along(axes);
  }

  // Returns the bytes of buffers for a plan line whose flats all take this route. Counts all
  // buffers between passes and all encoded pieces of lossy wires. Passes run one after another, so
  // only each flat's largest receive buffer is counted.
  int64_t buffer_bytes(const Route& way, Role role, const std::vector<int>& units,
                       bool adds = false) const {
    int64_t sum = 0;
    for (const Mesh& mesh : meshes_of(role, units)) sum += packed_bytes(way, role, units, mesh);
    // A residual on the host is copied to the accelerator for the sum.
    const bool brings = role == Role::kGrad && model_.on_accelerator && has_residual(way) &&
                        cell(Role::kResidual, Phase::kRest).tier != Tier::kDevice;
    for (const int unit : units) {
      if (brings) sum += bytes(Role::kResidual, unit, cell(Role::kResidual, Phase::kRest));
    }
    for_each_flat(role, units, [&](const FlatDesc& flat) {
      int64_t received = 0;
      for (size_t i = 0; i < way.passes.size(); ++i) {
        const Pass& pass = way.passes[i];
        const bool there = model_.on_accelerator && pass.from.tier == Tier::kDevice;
        // An accelerator's back end also sends each rank its own part.
        if (pass.wire.lossy()) sum += encoded_bytes(pass, flat);
        if (pass.sums() && !pass.wire.lossy())
          received = std::max(received, shard_bytes(way, i, flat) *
                                            (group_size(pass.axes, flat) - (there ? 0 : 1)));
        // A sum is computed in the memory of its addends.
        const bool elsewhere = there && pass.sums() && pass.to.tier != Tier::kDevice;
        const bool stands = pass.kind != PassKind::kAllReduce && !way.into_next(i);
        if (stands && (elsewhere || !(adds ? i + 1 == way.passes.size() : way.ends_at(i))))
          sum += penstock::buffer_bytes(dtype_after(way, i, flat), owned(flat, pass.to));
      }
      sum += received;
    });
    return sum;
  }

  template <class Visit>
  void for_each_flat(Role role, const std::vector<int>& units, const Visit& visit) const {
    for (const int unit : units) {
      for (const FlatDesc& flat : model_.units[unit].flats) {
        if (flat.trainable || role == Role::kParam) visit(flat);
      }
    }
  }

  Dtype dtype_after(const Route& way, size_t pass, const FlatDesc& flat) const {
    return way.dtype_after(pass, dtype_in(way.from, flat), dtype_in(way.to, flat));
  }

  // Returns the bytes that a rank sends to each peer of a collective that moves the flat. `here`:
  // the bytes of the rank's copy. `place`: the placement before the collective.
  int64_t piece_bytes(const Move& move, int64_t here, const FlatDesc& flat,
                      const Placement& place) const {
    const int64_t pieces = move.kind == MoveKind::kAllGather ? 1 : group_size(move.axes, flat);
    return move.wire.lossy() ? move.wire.encoded_bytes(owned(flat, place) / pieces) : here / pieces;
  }

  // Returns the number of values that a rank encodes and decodes in a collective that moves the
  // flat. `place`: the placement before the collective.
  int64_t coded_values(const Move& move, const FlatDesc& flat, const Placement& place) const {
    const int64_t size = group_size(move.axes, flat), numel = owned(flat, place);
    if (size == 1) return 0;
    if (move.kind == MoveKind::kAllGather) return numel * (1 + size);
    return 2 * numel + (move.kind == MoveKind::kAllReduce ? numel / size + numel : 0);
  }

  // Returns the memory for a flat's encoded pieces. A sum has pieces to send and pieces to receive.
  int64_t encoded_bytes(const Pass& pass, const FlatDesc& flat) const {
    const int64_t members = group_size(pass.axes, flat);
    int64_t numel = owned(flat, pass.from);
    if (pass.sums()) numel /= members;
    return pass.wire.encoded_bytes(numel) * members * (pass.sums() ? 2 : 1);
  }

  // Returns the bytes of one shard in a collective pass.
  int64_t shard_bytes(const Route& way, size_t index, const FlatDesc& flat) const {
    const Pass& pass = way.passes[index];
    const int64_t numel = owned(flat, pass.from);
    if (!pass.sums()) return numel * dtype_bytes(dtype_after(way, index, flat));
    const Dtype before = index == 0 ? dtype_in(way.from, flat) : dtype_after(way, index - 1, flat);
    return numel * dtype_bytes(before) / group_size(pass.axes, flat);
  }

  Route route_of(const Copies& copies, const std::vector<Move>& moves) const {
    const std::optional<Placement> from = copies.source(moves);
    PENSTOCK_ASSERT(from, concat("no copy for ", moves.front().text(), " to start from"));
    return route(*from, moves, mesh_, 0);
  }

 protected:
  // Returns the meshes of the flats that a plan line moves. The line makes its exchanges once per
  // mesh.
  std::vector<Mesh> meshes_of(Role role, const std::vector<int>& units) const {
    std::vector<Mesh> meshes;
    for_each_flat(role, units, [&](const FlatDesc& flat) {
      const Mesh mesh = flat.placement.mesh(mesh_);
      if (std::find(meshes.begin(), meshes.end(), mesh) == meshes.end()) meshes.push_back(mesh);
    });
    return meshes.empty() ? std::vector<Mesh>{mesh_} : meshes;
  }

  // Returns the bytes in which small buffers of a plan line are packed, for the flats of one mesh.
  // Passes run one after another, so the largest counts.
  int64_t packed_bytes(const Route& way, Role role, const std::vector<int>& units,
                       const Mesh& mesh) const {
    int64_t packed = 0;
    for (size_t i = 0; i < way.passes.size(); ++i) {
      const Pass& pass = way.passes[i];
      Packing packing;
      for_each_flat(role, units, [&](const FlatDesc& flat) {
        const bool here = flat.placement.mesh(mesh_) == mesh;
        if (here && !pass.wire.lossy()) packing.add(shard_bytes(way, i, flat));
      });
      const int64_t size = mesh.ranks_along(pass.axes);
      if (pass.sums()) packed = std::max(packed, packing.reduce_bytes(size));
      if (pass.kind == PassKind::kAllGather) packed = std::max(packed, packing.gather_bytes(size));
    }
    return packed;
  }

  Dtype dtype_in(const Placement& place, const FlatDesc& flat) const {
    return table_.dtype_in(place, flat.dtype, flat.quantized);
  }

  const Table table_;
  const ModelDesc& model_;
  const Mesh mesh_;

 private:
  const double moments_per_param_;
};

}  // namespace penstock
