#include "src/exec/rank.h"

#include <algorithm>
#include <utility>

namespace penstock::exec {

namespace {

device::LaneKind kind_of(const Table& table, Role role, const device::Device& device,
                         bool peers_meet_on_host) {
  if (device.is_host() || peers_meet_on_host) return device::LaneKind::kThread;
  for (int phase = 0; phase < kNumPhases; ++phase) {
    if (table.at(role, static_cast<Phase>(phase)).tier != Tier::kDevice)
      return device::LaneKind::kThread;
  }
  return device::LaneKind::kQueued;
}

// Returns whether gradients of any flat are summed over the axis.
bool sums_over(const std::vector<UnitState>& units, Axis axis) {
  return std::any_of(units.begin(), units.end(), [&](const UnitState& unit) {
    return std::any_of(unit.flats.begin(), unit.flats.end(), [&](const Flat& flat) {
      return flat.trainable && flat.placement.is_partial(axis);
    });
  });
}

// Returns the parts of users' files that are in this rank's shard of the resting flat.
std::vector<mem::FilePart> own_parts(const Rank& rank, const Flat& flat, const Buffer& shard) {
  const int64_t begin = rank.begin_of(rank.cells.param_rest, flat) * dtype_bytes(shard.dtype);
  std::vector<mem::FilePart> own;
  for (const mem::FilePart& part : flat.files) {
    const int64_t first = std::max(part.at, begin);
    const int64_t end = std::min(part.at + part.bytes, begin + shard.bytes());
    if (first >= end) continue;
    own.push_back(part);
    own.back().offset += first - part.at;
    own.back().bytes = end - first;
    own.back().at = first - begin;
  }
  return own;
}

}  // namespace

int count_slots(const std::vector<UnitState>& units) {
  size_t count = 0;
  for (const UnitState& unit : units) {
    for (const Flat& flat : unit.flats) count += flat.slots.size();
    for (const Flat& flat : unit.away) count += flat.slots.size();
  }
  return static_cast<int>(count);
}

Lanes::Lanes(const Table& table, const device::Device& device, bool peers_meet_on_host)
    : gather("penstock-gather", device, kind_of(table, Role::kParam, device, peers_meet_on_host)),
      reduce("penstock-reduce", device, kind_of(table, Role::kGrad, device, peers_meet_on_host)),
      update("penstock-update", device, kind_of(table, Role::kOptim, device, false)),
      launches(device.where()) {}

void Lanes::record(const std::shared_ptr<trace::Recorder>& recorder) {
  gather.record(recorder, "gather");
  reduce.record(recorder, "reduce");
  update.record(recorder, "update");
}

Rank::Rank(const Table& strategy, const Mesh& ranks, Group& peers, mem::Tiers& memory,
           std::vector<UnitState> parts)
    : table(strategy.on(ranks)),
      cells(table),
      group(peers),
      tiers(memory),
      units(std::move(parts)),
      meshes(units, ranks, peers.rank()),
      mesh(meshes.run().mesh),
      groups(meshes.run().groups),
      num_slots(count_slots(units)),
      traffic(memory),
      channels(groups, ranks, peers, units) {
  tiers.computes.make_current();  // [Note: Contexts]
  connect();
  for (UnitState& unit : units) {
    unit.params = Copies::resting(cells.param_rest);
    unit.grads = Copies::moving();
    unit.attached = cells.param_rest == whole();
  }
}

const Members& Rank::replicas(const Flat& flat) const {
  std::vector<Axis> axes = {Axis::kNode, Axis::kLocal};
  for (const Axis axis : kModelAxes) {
    if (axis != Axis::kPipeline && !flat.placement.is_sharded(axis)) axes.push_back(axis);
  }
  return meshes.of(flat).groups.of(axes);
}

// Each lane gets its own connections, because collectives on one connection run one after another:
// a gather would wait for the reductions that were launched before it.
void Rank::connect() {
  if (!on_accelerator() || !group.device_groups()) return;
  std::vector<const Members*> done;
  const auto use = [&](const Groups& of, const std::vector<Axis>& axes,
                       const std::vector<comm::Channel*>& by) {
    const Members& members = of.of(axes);
    if (members.size() < 2 || std::count(done.begin(), done.end(), &members) > 0) return;
    done.push_back(&members);
    for (comm::Channel* channel : by) {
      channel->use(members, group.connect_on_device(members.ranks, tiers.computes.where()));
    }
    connected = true;
  };
  const std::vector<comm::Channel*> lanes = {&channels.gather, &channels.reduce};
  for (const FlatMesh& one : meshes.all()) {
    use(one.groups, {Axis::kNode, Axis::kLocal}, lanes);
    use(one.groups, {Axis::kLocal}, lanes);
    use(one.groups, {Axis::kNode}, lanes);
  }
  // The addends of gradients are summed on the model's thread.
  for (const Axis axis : kModelAxes) {
    if (axis == Axis::kPipeline || !sums_over(units, axis)) continue;
    use(groups, {axis}, {&channels.stage()});
  }
  if (!sums_over(units, Axis::kPipeline)) return;
  channels.connect_tied(group, tiers.computes.where());
  connected = true;
}

Buffer Rank::buffer_at(const Placement& place, const Flat& flat) const {
  Buffer buffer;
  buffer.numel = numel_of(place, flat);
  buffer.dtype = dtype_of(place, flat);
  buffer.tier = place.tier;
  return buffer;
}

void Rank::claim_params(Flat& flat) {
  const Placement& rest = cells.param_rest;
  const Placement& held = cells.param_hold;
  // Reserves room for all possible copies. Lanes keep a pointer to the resting copy while other
  // copies are added and removed, so the vector must not reallocate.
  flat.params.reserve(4);
  flat.in_files = !flat.files.empty();
  std::vector<Placement> places = {rest};
  if (held.tier == Tier::kDisk && held != rest) places.push_back(held);
  for (const Placement& place : places) {
    Copy& copy = flat.params.emplace_back();
    copy.place = place;
    copy.valid = place == rest;
    copy.buffers.push_back(buffer_at(place, flat));
    if (place == rest && flat.in_files) {
      copy.one().offset = tiers.disk->adopt(own_parts(*this, flat, copy.one()));
      flat.files.clear();  // or the files would stay open after close()
    } else {
      reserve(copy.one());
    }
  }
}

void Rank::claim_state(Flat& flat, int num_chunks, int num_moments) {
  const Placement& held = cells.grad_hold;
  const Placement& optim = cells.optim_rest;
  if (held.tier == Tier::kDisk) {
    Copy& copy = flat.grads.emplace_back();
    copy.place = held;
    copy.valid = false;
    copy.buffers.push_back(buffer_at(held, flat));
    reserve(copy.one());
  }
  // A chunk's part of a buffer on disk shares the extent of the whole buffer.
  if (cells.base) flat.base = buffer_at(*cells.base, flat);
  const auto part_of = [](const Buffer& whole, int64_t begin, int64_t numel) {
    Buffer part;
    part.dtype = whole.dtype;
    part.tier = whole.tier;
    part.numel = numel;
    part.offset = whole.offset + begin * dtype_bytes(whole.dtype);
    return part;
  };
  for (int index = 0; index < num_chunks; ++index) {
    const auto [begin, end] = range_of({index, num_chunks}, numel_of(optim, flat));
    ChunkState& chunk = flat.chunks.emplace_back();
    chunk.begin = begin;
    chunk.numel = end - begin;
    Copy& state = chunk.optim.emplace_back();
    state.place = optim;
    // Buffer 0 is the fp32 master. It stays empty if the resting parameter is the master.
    for (int i = 0; i <= num_moments; ++i) {
      Buffer& buffer = state.buffers.emplace_back();
      buffer.dtype = i == 0 ? Dtype::kFp32 : optim.dtype;
      buffer.tier = optim.tier;
      if (i > 0 || keeps_master(flat)) buffer.numel = chunk.numel;
      reserve(buffer);
    }
    if (cells.publishes_chunks) chunk.param = part_of(flat.rest().one(), begin, chunk.numel);
    if (cells.grads_in_chunks)
      chunk.gradient = part_of(flat.grads.front().one(), begin, chunk.numel);
  }
}

// An invalid copy under the placement is reused, because it keeps its extent on disk.
Copy& Rank::open(std::vector<Copy>& copies, const Placement& place, const Flat& flat,
                 mem::Account account) {
  auto found = copies.begin();
  while (found != copies.end() && found->place != place) ++found;
  if (found == copies.end()) {
    Copy copy{place, {}, true};
    copy.buffers.push_back(buffer_at(place, flat));
    copies.push_back(std::move(copy));
    found = copies.end() - 1;
  }
  traffic.make_room(found->one(), account);
  found->valid = true;
  return *found;
}

}  // namespace penstock::exec
