#pragma once
// Rank: what the parts of one rank's executor share. And the lanes that they give work to.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "penstock/group.h"
#include "src/device/lane.h"
#include "src/exec/channels.h"
#include "src/exec/copy.h"
#include "src/exec/flat.h"
#include "src/exec/walk.h"
#include "src/mem/tiers.h"
#include "src/plan/plan.h"

namespace penstock::exec {

// A step, and the label of its collectives: its text and its units' modules.
struct PlannedStep {
  Step step;
  comm::Label label;
  bool writes_back = false;  // update: the optimizer's pass writes what a publish begins with
};

// Parameters that users may have written to where the write is lost: how many of the flat's values
// differ, a scalar on the device, which is read with the norm.
struct Doubt {
  const Flat* flat = nullptr;
  at::Tensor edits;
};

// Each ordered; between them only events count. Gathers, reductions, and updates on the host.
struct Lanes {
  // One that only queues work on the device needs no thread: where neither a tier of its role nor
  // its group takes anything of the host.
  Lanes(const Table& table, const device::Device& device, bool peers_meet_on_host);

  // Before their first work.
  void record(const std::shared_ptr<trace::Recorder>& recorder);

  device::Lane gather, reduce, update;
};

struct Rank {
  Rank(const Table& cells, const Mesh& ranks, Group& peers, mem::Tiers& memory,
       std::vector<UnitState> parts);

  const Placement& cell(Role role, Phase phase) const { return table.at(role, phase); }
  // What a phase computes with.
  const Placement& whole() const { return cell(Role::kParam, Phase::kForward); }
  Dtype dtype_of(const Placement& place, const Flat& flat) const {
    return table.dtype_in(place, flat.dtype);
  }
  int64_t numel_of(const Placement& place, const Flat& flat) const {
    return flat.numel / num_shards(place, mesh);
  }
  // Of the chunk, where it is updated: what is not streamed may rest cut otherwise.
  int64_t numel_updated(const Flat& flat, const ChunkState& chunk) const {
    return flat.chunks.size() > 1 ? chunk.numel
                                  : numel_of(cell(Role::kOptim, Phase::kUpdate), flat);
  }
  // The first element of this rank's shard there.
  int64_t begin_of(const Placement& place, const Flat& flat) const {
    return shard_index(place, mesh, group.rank()) * numel_of(place, flat);
  }
  // The resting parameters are the model's own, and their masters are elsewhere: an edit by users
  // is in the one and not yet in the other.
  bool users_write(const Flat& flat) const {
    return flat.trainable && flat.rest().place == whole() &&
           has_master[static_cast<size_t>(flat.dtype)];
  }
  // They are on a device and their masters are not: looking for edits would bring all of them.
  bool edits_cross(const Flat& flat) const {
    return users_write(flat) && flat.rest().one().data().device != nullptr &&
           cell(Role::kOptim, Phase::kUpdate).tier != Tier::kDevice;
  }
  Walk walk(const Placement& from, const std::vector<Move>& moves, bool consumes = true) {
    return {route(from, moves, mesh, group.rank(), consumes), mesh, groups, tiers};
  }
  // Of values in host memory, whatever the tiers, and there whatever they come to.
  Walk walk_on_host(const Placement& from, const std::vector<Move>& moves) {
    return {route(from, moves, mesh, group.rank(), false), mesh, groups, tiers, true};
  }
  bool on_accelerator() const { return !tiers.computes.is_host(); }
  // The stage that counts and saves what several have.
  bool is_first_owner(const Flat& flat) const {
    return flat.owners.empty() || flat.owners.front() == groups.pipeline().index;
  }
  // Those with the same part of it on each of the stages that have it.
  Members owners_across(const Flat& flat) const;
  // The ranks of this stage that have the very same values of the flat's parameters.
  const Members& owners_of(const Flat& flat) const {
    return flat.tensor == TensorCut::kCut ? groups.data() : groups.stage();
  }
  // What a flat keeps for good, without memory yet: copies that rest, and their places on disk.
  void claim_params(Flat& flat);
  void claim_state(Flat& flat, int num_chunks, int num_moments);
  // A buffer of a flat there, without memory.
  Buffer buffer_at(const Placement& place, const Flat& flat) const;
  // The copy there, of values to come: with memory, and valid.
  Copy& open(std::vector<Copy>& copies, const Placement& place, const Flat& flat,
             mem::Account account);

  void connect();

  void reserve(Buffer& buffer) {
    if (buffer.on_disk() && buffer.exists()) buffer.offset = tiers.disk->reserve(buffer.bytes());
  }

  const Table table;
  // Of the table; asked for in every update.
  const bool grads_on_disk, grads_in_chunks, publishes_chunks;
  const std::array<bool, 3> has_master;  // by Dtype
  const Mesh mesh;
  const Groups groups;
  Group& group;
  mem::Tiers& tiers;
  std::vector<UnitState> units;
  const int num_slots;  // of all stages
  mem::DiskTraffic traffic;
  std::vector<Doubt> doubts;
  Channels channels;
};

}  // namespace penstock::exec
