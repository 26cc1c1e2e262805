#pragma once
// Rank: the state that the parts of one rank's executor share. Lanes: the threads to which these
// parts submit work.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "penstock/group.h"
#include "src/comm/launch_order.h"
#include "src/device/lane.h"
#include "src/exec/channels.h"
#include "src/exec/copy.h"
#include "src/exec/flat.h"
#include "src/exec/walk.h"
#include "src/mem/tiers.h"
#include "src/plan/plan.h"

namespace penstock::exec {

// A plan line and the label of its collectives. The label contains the line's text and the modules
// of its units.
struct PlannedStep {
  Step step;
  comm::Label label;
  bool writes_back = false;  // update: the optimizer's pass is also the first pass of the publish
};

// A check for lost user edits. Its result is not read yet. `edits`: whether values of the flat
// differ from the resting shard, as a device scalar that the norm reads.
struct Doubt {
  const Flat* flat = nullptr;
  at::Tensor edits;
};

// The lanes for gathers, reductions and updates. Each lane is ordered, but only fences order work
// between lanes.
struct Lanes {
  // A lane has no thread if it only queues device work: all tiers of the lane's role are on the
  // device, and the group does not exchange host memory.
  Lanes(const Table& table, const device::Device& device, bool peers_meet_on_host);

  // Must be called before the first work is submitted.
  void record(const std::shared_ptr<trace::Recorder>& recorder);

  // Returns the turn of the next line of the plan. Returns null if the walk, which begins at pass
  // `first`, launches no collectives on a device. The model's thread only.
  std::shared_ptr<comm::LaunchTurn> take_turn(const Walk& walk, size_t first = 0) {
    return walk.meets_on_device(first) ? take_turn() : nullptr;
  }
  std::shared_ptr<comm::LaunchTurn> take_turn() { return connected ? launches.next() : nullptr; }

  device::Lane gather, reduce, update;
  bool connected = false;  // whether ranks meet on a device
  comm::LaunchOrder launches;
};

// Returns the number of slots over all stages.
int count_slots(const std::vector<UnitState>& units);

struct Rank {
  Rank(const Table& strategy, const Mesh& ranks, Group& peers, mem::Tiers& memory,
       std::vector<UnitState> parts);

  const Placement& cell(Role role, Phase phase) const { return table.at(role, phase); }
  // Returns the placement of parameters for computing.
  const Placement& whole() const { return cells.param_forward; }
  Dtype dtype_of(const Placement& place, const Flat& flat) const {
    return table.dtype_in(place, flat.dtype, flat.quantized);
  }
  int64_t numel_of(const Placement& place, const Flat& flat) const {
    return flat.numel / num_shards(place, meshes.of(flat).mesh);
  }
  // Returns the number of the chunk's elements in the update cell. A flat with one chunk may be
  // sharded differently at rest.
  int64_t numel_updated(const Flat& flat, const ChunkState& chunk) const {
    return flat.chunks.size() > 1 ? chunk.numel : numel_of(cells.optim_update, flat);
  }
  // Returns the first element of this rank's shard under `place`.
  int64_t begin_of(const Placement& place, const Flat& flat) const {
    return shard_index(place, meshes.of(flat).mesh, group.rank()) * numel_of(place, flat);
  }
  // Returns whether a user's edit can change the resting parameters and leave the masters
  // unchanged. This is possible if forward and backward use the resting copy and the masters are in
  // separate buffers. The update copies such edits to the masters.
  bool users_write(const Flat& flat) const {
    return flat.trainable && flat.rest().place == whole() && keeps_master(flat);
  }
  bool keeps_master(const Flat& flat) const {
    return cells.has_master[static_cast<size_t>(flat.dtype)];
  }
  // Returns whether a search for the edits of users_write() copies parameters from a device to the
  // host. If so, the update searches only if fingerprints (Flat::left) show an edit.
  bool edits_cross(const Flat& flat) const {
    return users_write(flat) && flat.rest().one().data().device != nullptr &&
           !cells.updates_on_device();
  }
  Walk walk(const Placement& from, const std::vector<Move>& moves, bool consumes = true) {
    return {{from, moves, consumes, false}, meshes.run(), group.rank(), tiers};
  }
  // Makes a walk from host memory to host memory. The tiers of the placements are ignored.
  Walk walk_on_host(const Placement& from, const std::vector<Move>& moves) {
    return {{from, moves, false, true}, meshes.run(), group.rank(), tiers};
  }
  bool on_accelerator() const { return !tiers.computes.is_host(); }
  // Returns whether this rank counts its values of the flat ([Note: Model axes]).
  bool counts(const Flat& flat) const { return flat.placement.is_counted_by(mesh, group.rank()); }
  // Returns the ranks of this stage whose parameters of the flat have the same values.
  const Members& replicas(const Flat& flat) const;
  // Both functions make the copies that a flat keeps for the whole run. Resting copies get
  // no memory yet, but those on disk get their extents.
  void claim_params(Flat& flat);
  void claim_state(Flat& flat, int num_chunks, int num_moments);
  // Makes a buffer of the flat under `place`, without memory.
  Buffer buffer_at(const Placement& place, const Flat& flat) const;
  // Returns the copy under `place`, and makes it if there is none. The copy has memory and is
  // marked as valid. The caller must write its values.
  Copy& open(std::vector<Copy>& copies, const Placement& place, const Flat& flat,
             mem::Account account);

  void connect();

  void reserve(Buffer& buffer) {
    if (buffer.on_disk() && buffer.exists()) buffer.offset = tiers.disk->reserve(buffer.bytes());
  }

  const Table table;
  const Cells cells;
  Group& group;
  mem::Tiers& tiers;
  std::vector<UnitState> units;
  const FlatMeshes meshes;
  const Mesh& mesh;  // of the run
  const Groups& groups;
  const int num_slots;  // number of slots over all stages
  mem::DiskTraffic traffic;
  std::vector<Doubt> doubts;  // read by the next norm
  Channels channels;
  bool connected = false;  // whether ranks meet on a device
};

}  // namespace penstock::exec
