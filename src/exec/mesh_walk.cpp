#include "src/exec/mesh_walk.h"

#include <algorithm>
#include <utility>

#include "src/device/kernels.h"
#include "src/device/wire_codec.h"

namespace penstock::exec {

using device::Address;

MeshWalk::MeshWalk(Route route, const Mesh& mesh, const Groups& groups, mem::Tiers& tiers,
                   bool on_host)
    : route_(std::move(route)), mesh_(mesh), tiers_(tiers), on_host_(on_host) {
  for (const Pass& pass : route_.passes) members_.push_back(&groups.of(pass.axes));
}

int64_t MeshWalk::numel_at(const Travel& travel, const Placement& place) const {
  return travel.numel / num_shards(place, mesh_);
}

Dtype MeshWalk::dtype_before(const Travel& travel, size_t pass) const {
  return pass == 0 ? travel.first : dtype_after(travel, pass - 1);
}

// A gather or an all-reduce keeps the dtype. If the last dtype differs, arrive() casts.
Dtype MeshWalk::dtype_after(const Travel& travel, size_t pass) const {
  const PassKind kind = route_.passes[pass].kind;
  if (kind == PassKind::kAllReduce || kind == PassKind::kAllGather) {
    return dtype_before(travel, pass);
  }
  return route_.dtype_after(pass, travel.first, travel.last);
}

Address MeshWalk::input(size_t travel, size_t pass) const {
  return pass == 0 ? travels_[travel].from : stops_[travel][pass - 1];
}

// Returns whether the pass itself adds to the values at `to`; otherwise arrive() adds.
bool MeshWalk::adds_here(const Travel& travel, size_t pass) const {
  const PassKind kind = route_.passes[pass].kind;
  return travel.adds && pass + 1 == route_.passes.size() && !sums_elsewhere(travel, pass) &&
         (kind == PassKind::kLocal || kind == PassKind::kReduceScatter);
}

// Returns whether the sum is made in memory other than `to`. A sum is made in the memory of its
// addends, and arrive() copies it to `to`.
bool MeshWalk::sums_elsewhere(const Travel& travel, size_t pass) const {
  return route_.passes[pass].sums() && travel.to.device != owner(route_.passes[pass].from.tier);
}

Address MeshWalk::scratch(Tier tier, int64_t bytes) {
  mem::Arena& arena = on_host_ && tier == Tier::kDevice ? tiers_.on_host() : tiers_.arena(tier);
  leases_.push_back(arena.take(std::max<int64_t>(1, bytes), mem::Account::kBuffers));
  return leases_.back().data();
}

// Chooses the output address of each pass, from the last pass to the first. So a pass can write
// directly to `to` or to its place in the next gather. A pass needs scratch memory only if neither
// is possible.
void MeshWalk::lay_out(size_t index) {
  const Travel& travel = travels_[index];
  const std::vector<Pass>& passes = route_.passes;
  std::vector<Address>& stops = stops_[index];
  int64_t receives = 0;  // largest need of a pass, because passes run one after another
  Tier sums_at = Tier::kDevice;
  for (size_t i = passes.size(); i-- > 0;) {
    const Pass& pass = passes[i];
    const int64_t bytes = buffer_bytes(dtype_after(travel, i), numel_at(travel, pass.to));
    if (pass.sums()) sums_at = pass.from.tier;
    if (pass.sums() && !pass.wire.lossy()) {
      const int64_t here = numel_at(travel, pass.from) * dtype_bytes(dtype_before(travel, i));
      const int64_t size = members_[i]->size();
      // A device back end also sends a rank's own part to that rank.
      const int64_t parts = owner(sums_at) == nullptr ? size - 1 : size;
      receives = std::max(receives, here / size * parts);
    }
    if (pass.kind == PassKind::kAllReduce) continue;  // works in place
    const bool as_it_ends =
        !travel.adds && dtype_after(travel, i) == travel.last && !sums_elsewhere(travel, i);
    if ((route_.ends_at(i) && as_it_ends) || adds_here(travel, i)) {
      stops[i] = travel.to;
    } else if (route_.into_next(i)) {
      stops[i] = stops[i + 1] + members_[i + 1]->index * bytes;
    } else {
      stops[i] = scratch(pass.sums() ? pass.from.tier : pass.to.tier, bytes);
    }
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    if (passes[i].kind == PassKind::kAllReduce) stops[i] = i == 0 ? travel.from : stops[i - 1];
  }
  received_.push_back(receives > 0 ? scratch(sums_at, receives) : Address());
}

// Fills in the buffers of a collective. Returns the bytes that it needs for packing.
int64_t MeshWalk::lay_out_collective(size_t index) {
  const Pass& pass = route_.passes[index];
  const Members& members = *members_[index];
  const float scale = 1.0F / static_cast<float>(members.size());
  const bool counts = index + 1 == route_.passes.size() && counts_squares();
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel& travel = travels_[t];
    const int64_t numel = numel_at(travel, pass.from);
    const Dtype before = dtype_before(travel, index), after = dtype_after(travel, index);
    const Address to = stops_[t][index];
    if (!pass.sums()) {
      gathers_[index].push_back({to, numel * dtype_bytes(after)});
      continue;
    }
    // If the pass does not write to `to`, arrive() still changes the values, so their squares are
    // not counted yet.
    double* const squares =
        counts && to == travel.to && to.device == nullptr ? travel.squares : nullptr;
    reduces_[index].push_back({input(t, index), received_[t], to, before, after, numel, scale,
                               adds_here(travel, index), squares});
  }
  if (pass.wire.lossy()) {
    add_encoded(index);
    return 0;
  }
  return std::max(comm::Channel::staging_bytes(members, gathers_[index]),
                  comm::Channel::staging_bytes(members, reduces_[index]));
}

// Residuals that are not in the memory of the sum are copied there and back.
void MeshWalk::place_residuals() {
  for (const Travel& travel : travels_) {
    device::Residual here = travel.residual.values;
    const bool used = here.kept() || here.before.data != nullptr;
    const device::Device* const kept = (here.kept() ? here.after : here.before).device;
    const Tier tier = used ? route_.passes[travel.residual.pass].from.tier : Tier::kDevice;
    if (used && kept != owner(tier)) {
      const Address room = scratch(tier, travel.residual.numel * dtype_bytes(here.dtype));
      if (here.before.data != nullptr) here.before = room;
      if (here.kept()) here.after = room;
    }
    residuals_.push_back(here);
  }
}

void MeshWalk::bring_residuals(size_t index) const {
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel::Fed& fed = travels_[t].residual;
    const device::Residual& here = residuals_[t];
    if (fed.pass != index || here.before.data == nullptr) continue;
    if (here.before != fed.values.before) {
      device::copy(here.before, fed.values.before, fed.numel * dtype_bytes(here.dtype));
    }
    if (route_.passes[index].wire.lossy()) continue;  // the encoding adds it
    const Dtype dtype = dtype_before(travels_[t], index);
    device::add_residual(here, fed.factor, input(t, index) + fed.offset * dtype_bytes(dtype), dtype,
                         fed.numel);
  }
}

void MeshWalk::return_residuals(size_t index) const {
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel::Fed& fed = travels_[t].residual;
    const device::Residual& here = residuals_[t];
    if (fed.pass != index || !here.kept() || here.after == fed.values.after) continue;
    device::copy(fed.values.after, here.after, fed.numel * dtype_bytes(here.dtype));
  }
}

void MeshWalk::add_encoded(size_t index) {
  EncodedPass& encoded = encoded_[index];
  const Pass& pass = route_.passes[index];
  for (size_t t = 0; t < travels_.size(); ++t) {
    if (pass.sums()) {
      const Travel::Fed& fed = travels_[t].residual;
      encoded.add_sum(reduces_[index][t], pass.kind == PassKind::kAllReduce, travels_[t].noise);
      if (fed.pass == index) encoded.feed(residuals_[t], fed.gaps);
    } else {
      encoded.add_gather(input(t, index), stops_[t][index], dtype_before(travels_[t], index),
                         numel_at(travels_[t], pass.from));
    }
  }
  encoded_room_[index] = scratch(pass.from.tier, encoded.room_bytes());
}

void MeshWalk::ready() {
  const size_t num_passes = route_.passes.size();
  stops_.assign(travels_.size(), std::vector<Address>(num_passes));
  gathers_.resize(num_passes);
  reduces_.resize(num_passes);
  encoded_room_.resize(num_passes);
  for (size_t i = 0; i < num_passes; ++i) {
    encoded_.emplace_back(route_.passes[i].wire, *members_[i], i);
  }
  for (size_t t = 0; t < travels_.size(); ++t) lay_out(t);
  place_residuals();
  int64_t staging = 0;
  Tier tier = Tier::kDevice;
  for (size_t i = 0; i < num_passes; ++i) {
    if (route_.passes[i].kind == PassKind::kLocal) continue;
    staging = std::max(staging, lay_out_collective(i));
    tier = route_.passes[i].from.tier;
  }
  if (staging > 0) staging_ = {scratch(tier, staging), staging};
  ready_ = true;
}

// Returns the packing buffer if it is in the memory that the pass works in.
comm::Staging MeshWalk::staging_of(size_t index) const {
  const bool fits = staging_.data.device == owner(route_.passes[index].from.tier);
  return fits ? staging_ : comm::Staging{};
}

// The squares of the last sum are used only if this rank sums the same part that it counts for the
// norm (Gradients::own_squares).
bool MeshWalk::counts_squares() const {
  if (route_.passes.empty() || !route_.passes.back().sums()) return false;
  const Pass& last = route_.passes.back();
  for (const Axis axis : {Axis::kNode, Axis::kLocal}) {
    if (mesh_.size(axis) == 1) continue;
    const bool replicated = last.to.on(axis) == Layout::kReplicated;
    const bool summed = std::find(last.axes.begin(), last.axes.end(), axis) != last.axes.end();
    if (replicated != (summed && last.kind == PassKind::kAllReduce)) return false;
  }
  return true;
}

// Returns the number, counted from 1, of the last pass from `first` on that is a collective on the
// device. Returns 0 if there is none.
size_t MeshWalk::last_on_device(size_t first) const {
  for (size_t i = route_.passes.size(); i > first; --i) {
    const Pass& pass = route_.passes[i - 1];
    if (pass.kind != PassKind::kLocal && owner(pass.from.tier) != nullptr) return i;
  }
  return 0;
}

void MeshWalk::run(comm::Channel& channel, const comm::Label& label, size_t first,
                   comm::LaunchTurn* turn, bool leaves) {
  if (!ready_) ready();
  for (const Travel& travel : travels_) {
    if (tiers_.disk) tiers_.disk->wait(travel.arriving);
  }
  const size_t last = last_on_device(first);
  for (size_t i = first; i < route_.passes.size(); ++i) {
    const Pass& pass = route_.passes[i];
    if (host_reads(i)) tiers_.computes.synchronize();
    if (turn != nullptr && i < last && pass.kind != PassKind::kLocal) turn->wait();
    switch (pass.kind) {
      case PassKind::kLocal:
        local(i);
        break;
      case PassKind::kAllGather:
        gather(i, channel, label);
        break;
      case PassKind::kReduceScatter:
      case PassKind::kAllReduce:
        reduce(i, channel, label);
        break;
    }
    if (turn != nullptr && leaves && i + 1 == last) turn->leave();
  }
  arrive();
}

// Returns whether the host itself reads the pass's input, which a copy from the device may still be
// writing.
bool MeshWalk::host_reads(size_t index) const {
  if (tiers_.computes.is_host() || on_host_) return false;
  const Pass& pass = route_.passes[index];
  if (owner(pass.from.tier) != nullptr) return false;
  return pass.kind != PassKind::kLocal || owner(pass.to.tier) == nullptr;
}

void MeshWalk::local(size_t index) const {
  const Pass& pass = route_.passes[index];
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel& travel = travels_[t];
    const Dtype before = dtype_before(travel, index), after = dtype_after(travel, index);
    const int64_t numel = numel_at(travel, pass.from) / pass.parts;
    const Address whole = input(t, index);
    const Address from = pass.part == 0 ? whole : whole + pass.part * numel * dtype_bytes(before);
    if (from == stops_[t][index] && before == after) continue;
    device::recode(stops_[t][index], after, from, before, numel, adds_here(travel, index));
  }
}

void MeshWalk::gather(size_t index, comm::Channel& channel, const comm::Label& label) {
  if (route_.passes[index].wire.lossy()) {
    return encoded_[index].run(channel, label, encoded_room_[index]);
  }
  const std::vector<comm::GatherBuffer>& buffers = gathers_[index];
  for (size_t t = 0; t < travels_.size(); ++t) {
    const int64_t bytes = buffers[t].shard_bytes;
    const Address own = stops_[t][index] + members_[index]->index * bytes;
    if (own != input(t, index)) device::copy(own, input(t, index), bytes);
  }
  channel.all_gather(label, *members_[index], buffers, staging_of(index));
}

void MeshWalk::reduce(size_t index, comm::Channel& channel, const comm::Label& label) {
  bring_residuals(index);
  if (route_.passes[index].wire.lossy()) {
    encoded_[index].run(channel, label, encoded_room_[index]);
  } else if (route_.passes[index].kind == PassKind::kAllReduce) {
    channel.all_reduce(label, *members_[index], reduces_[index], staging_of(index));
  } else {
    channel.reduce_scatter(label, *members_[index], reduces_[index], staging_of(index));
  }
  return_residuals(index);
  count_squares(index);
}

// Computes squares on a device. Does nothing if arrive() adds the sum to other values afterwards.
void MeshWalk::count_squares(size_t index) const {
  const Pass& pass = route_.passes[index];
  if (index + 1 != route_.passes.size() || !counts_squares()) return;
  const Members& members = *members_[index];
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel& travel = travels_[t];
    Address sum = stops_[t][index];
    if (travel.norm_there == nullptr || sum.device == nullptr) continue;
    if (travel.adds && !adds_here(travel, index)) continue;
    const Dtype dtype = dtype_after(travel, index);
    int64_t numel = numel_at(travel, pass.to);
    if (pass.kind == PassKind::kAllReduce) {
      numel /= members.size();
      sum = sum + members.index * numel * dtype_bytes(dtype);
    }
    *travel.norm_there = device::norm_on_device(sum, dtype, numel);
  }
}

// Copies, casts or adds the output of the last pass to `to`, unless it was written there.
void MeshWalk::arrive() const {
  for (size_t t = 0; t < travels_.size(); ++t) {
    const Travel& travel = travels_[t];
    const bool moved = !route_.passes.empty();
    const Address at = moved ? stops_[t].back() : travel.from;
    if (at == travel.to) continue;
    const Dtype dtype = moved ? dtype_after(travel, stops_[t].size() - 1) : travel.first;
    device::recode(travel.to, travel.last, at, dtype, numel_at(travel, route_.to), travel.adds);
  }
}

}  // namespace penstock::exec
