#include "src/exec/gathered_values.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/base/text.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"
#include "src/device/wire_codec.h"
#include "src/exec/between_nodes.h"
#include "src/exec/delta_base.h"

namespace penstock::exec {

namespace {

at::Tensor zeros32(int64_t numel) { return at::zeros({numel}, at::TensorOptions(at::kFloat)); }
char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

// A value that is not finite would make its whole block NaN.
void refuse_nonfinite(const Flat& flat, const at::Tensor& values) {
  const int64_t bad =
      device::host::first_nonfinite(values.const_data_ptr(), flat.dtype, values.numel());
  for (const Slot& slot : flat.slots) {
    if (bad < slot.offset || bad >= slot.offset + slot.numel) continue;
    throw RuntimeFault(concat("[engine::parameters] parameter \"", slot.name,
                              "\" was given a value that is not finite, but it rests quantized "
                              "(quantize.dtype), so the values beside it would become NaN"));
  }
}

}  // namespace

// Returns the buffer's values in host memory: a view of host memory, or a copy from a device.
// Quantized values are decoded to `dtype`.
at::Tensor GatheredValues::on_host(const Buffer& buffer, Dtype dtype) const {
  if (rank_.on_accelerator())
    rank_.tiers.computes.synchronize();  // waits for copies from the device to the host
  if (is_quantized(buffer.dtype)) {
    return device::decoded(buffer.data(), buffer.dtype, dtype, buffer.numel, nullptr);
  }
  return device::brought(buffer.data(), buffer.dtype, buffer.numel, nullptr);
}

// Gathers the full flat in fp32. Does not change `own`, this rank's part in the placement's dtype.
at::Tensor GatheredValues::whole(Placement place, const void* own, const Flat& flat,
                                 const std::string& label) {
  at::Tensor full = zeros32(flat.numel);
  gather(place, static_cast<const char*>(own), flat, label, bytes_of(full));
  return full;
}

bool GatheredValues::through_devices(const Placement& place) const {
  return !devices_fail_ && meets_between_nodes(rank_, place);
}

void GatheredValues::gather(const Placement& from, const char* own, const Flat& flat,
                            const std::string& label, char* full) {
  if (through_devices(from)) {
    const FlatShard shard{rank_.meshes.of(flat), from, const_cast<char*>(own), flat.numel};
    return gather_between_nodes(rank_, lanes_, shard, label, full, Dtype::kFp32);
  }
  Placement place = from, wanted = rank_.whole();
  place.tier = Tier::kDevice;
  wanted.dtype = Dtype::kFp32;
  Walk walk = rank_.walk_on_host(place, hops(place, wanted));
  walk.add(rank_.meshes.of(flat),
           {const_cast<char*>(own), full, place.dtype, Dtype::kFp32, flat.numel});
  walk.run(rank_.channels.stage(), label);
}

// Gathers the full flat from this rank's buffer, which may be on disk and have any dtype.
at::Tensor GatheredValues::read(Buffer& own, Placement place, mem::Account account,
                                const Flat& flat, const std::string& label) {
  rank_.traffic.fetch(own, account);
  rank_.traffic.wait_read(own);
  place.dtype = is_quantized(own.dtype) ? flat.dtype : own.dtype;
  at::Tensor full = whole(place, on_host(own, flat.dtype).const_data_ptr(), flat, label);
  rank_.traffic.let_go(own);
  return full;
}

// Copies the masters of all chunks, in fp32, to one buffer.
void GatheredValues::own_masters(Flat& flat, char* to) {
  for (ChunkState& chunk : flat.chunks) {
    device::copy(to + chunk.begin * 4, updates_.fetch_master(flat, chunk),
                 rank_.numel_updated(flat, chunk) * 4);
    rank_.traffic.let_go(chunk.optim.back().buffers.front());
  }
  if (rank_.on_accelerator()) rank_.tiers.computes.synchronize();
}

Dtype GatheredValues::parameters(int unit, int index, char* room, bool everywhere) {
  updates_.finish();
  Flat& flat = rank_.units[unit].flats[index];
  const std::string label = concat("read u", unit, ".", index, " param");
  // Only the rank that updates a parameter can tell an edit from a delta that is not sent yet.
  const bool edits_first = rank_.cells.base && rank_.users_write(flat);
  if (edits_first) write(flat, 0, flat.numel, flat.rest().one().data());
  // The optimizer state of a flat with one chunk may rest under a placement other than the
  // update's.
  const bool one = flat.trainable && flat.chunks.size() == 1 && rank_.keeps_master(flat);
  Buffer* kept = one ? &flat.chunks.front().optim.back().buffers.front() : nullptr;
  Placement place = one ? rank_.cells.optim_rest : rank_.table.master();
  if (!flat.trainable) {
    kept = &flat.rest().one();
    place = flat.rest().place;
  }
  place.dtype = kept == nullptr ? Dtype::kFp32 : kept->dtype;
  if (is_quantized(place.dtype)) place.dtype = flat.dtype;
  if (kept != nullptr) {
    rank_.traffic.fetch(*kept, one ? mem::Account::kOptim : mem::Account::kParam);
    rank_.traffic.wait_read(*kept);
  }
  const at::Tensor part = kept == nullptr ? at::Tensor() : on_host(*kept, flat.dtype);
  char* const values = kept == nullptr ? nullptr : bytes_of(part);
  const int64_t part_bytes = rank_.numel_of(place, flat) * dtype_bytes(place.dtype);
  const FlatMesh& over = rank_.meshes.of(flat);
  const bool arrives = everywhere || over.groups.data().index == 0;
  char* own =
      arrives ? room + shard_index(place, over.mesh, rank_.group.rank()) * part_bytes : room;
  if (kept == nullptr) own_masters(flat, own);
  if (everywhere) {
    gather(place, kept == nullptr ? own : values, flat, label, room);
  } else if (through_devices(place)) {
    const FlatShard shard{over, place, kept == nullptr ? own : values, flat.numel};
    gather_between_nodes(rank_, lanes_, shard, label, arrives ? room : nullptr, place.dtype);
  } else {
    if (kept != nullptr && arrives) std::memcpy(own, values, part_bytes);
    rank_.channels.stage().collect(label, owners(place, over.mesh, rank_.group.rank()),
                                   kept == nullptr || arrives ? own : values, part_bytes);
  }
  if (kept != nullptr) rank_.traffic.let_go(*kept);
  const Dtype made = everywhere ? Dtype::kFp32 : place.dtype;
  if (arrives && rank_.users_write(flat) && !edits_first) {
    const Buffer& rest = flat.rest().one();
    device::take_edits(room, made, bytes_of(on_host(rest)), rest.dtype, flat.numel);
  }
  return made;
}

at::Tensor GatheredValues::resting(int unit, int index) {
  Flat& flat = rank_.units[unit].flats[index];
  const std::string label = concat("last u", unit, ".", index, " param");
  return read(flat.rest().one(), flat.rest().place, mem::Account::kParam, flat, label);
}

// Gathers a sum to which backwards may still add. The gaps are not zeroed yet, so only slots with a
// contribution are read.
at::Tensor GatheredValues::open_sum(const Flat& flat, const Copy* sum, const std::string& label) {
  const at::Tensor own = zeros32(flat.numel);
  if (rank_.on_accelerator()) rank_.tiers.computes.synchronize();  // as in on_host()
  for (const Slot& slot : flat.slots) {
    if (sum == nullptr || !slot.written) continue;
    device::take(bytes_of(own) + slot.offset * 4, Dtype::kFp32, sum->one().at(slot.offset),
                 sum->one().dtype, slot.numel, false);
  }
  if (rank_.on_accelerator()) rank_.tiers.computes.synchronize();
  if (flat.placement.num_summed() > 1) own.div_(flat.placement.num_summed());
  Placement place = rank_.table.grad_after_backward();
  place.dtype = Dtype::kFp32;
  return whole(place, own.data_ptr(), flat, label);
}

at::Tensor GatheredValues::gradient(int unit, int index) {
  updates_.finish();
  gradients_.finish();
  Flat& flat = rank_.units[unit].flats[index];
  const std::string label = concat("read u", unit, ".", index, " grad");
  const Placement& made = rank_.table.grad_after_backward();
  at::Tensor full = zeros32(flat.numel);
  for (Copy& copy : flat.grads) {
    if (!copy.valid || copy.place == made) continue;
    full.add_(read(copy.one(), copy.place, mem::Account::kGrad, flat, label));
  }
  // If each rank holds its own sum of gradients, every rank takes part, with or without a gradient.
  const Copy* open = find(flat.grads, made);
  at::Tensor sum;
  if (rank_.table.holds_grad_in_place() || open != nullptr) sum = open_sum(flat, open, label);
  // A copy on disk has the sum of all addends already.
  if (!rank_.cells.grads_on_disk) {
    if (sum.defined()) full.add_(sum);
    sum = full;
  }
  for (const Axis axis : kModelAxes) {
    if (!sum.defined() || !flat.placement.is_partial(axis)) continue;
    add_up(rank_.channels.addends(flat, axis), bytes_of(sum), Dtype::kFp32, flat.numel, label);
  }
  if (sum.defined() && !sum.is_same(full)) full.add_(sum);
  return full;
}

// ---- over the model axes

namespace {

// Makes room for the parts of `count` ranks, each as large as the largest part, and copies this
// rank's part to `index`.
at::Tensor room_for_parts(const Slot& slot, int count, int index, const at::Tensor& part) {
  const auto options = part.defined() ? part.options() : at::TensorOptions(at::kFloat);
  at::Tensor parts = at::zeros({count, slot.room}, options);
  if (part.defined()) parts.select(0, index).narrow(0, 0, slot.numel).copy_(part.reshape({-1}));
  return parts;
}

at::Tensor put_together(const Slot& slot, const at::Tensor& parts, const Members& ranks) {
  at::Tensor whole = at::empty(slot.whole, parts.options());
  const int64_t dim = slot.cut.dim;
  for (int other = 0; other < ranks.size(); ++other) {
    std::vector<int64_t> sizes = slot.whole;
    sizes.at(dim) = slot.cut.size(other, ranks.size());
    const at::Tensor theirs =
        parts.select(0, other).narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
    int64_t at = 0;
    for (const auto& [first, end] : slot.cut.ranges(other, ranks.size())) {
      whole.narrow(dim, first, end - first).copy_(theirs.narrow(dim, at, end - first));
      at += end - first;
    }
  }
  return whole;
}

}  // namespace

at::Tensor GatheredValues::whole_of(const Slot& slot, const at::Tensor& part) {
  if (!slot.is_cut()) return part;
  const Members& ranks = rank_.meshes.along(slot.cut.axis).of({slot.cut.axis});
  const at::Tensor parts = room_for_parts(slot, ranks.size(), ranks.index, part.cpu());
  rank_.channels.stage().all_gather(
      concat("whole ", slot.name), ranks,
      {{parts.data_ptr(), slot.room * static_cast<int64_t>(part.element_size())}});
  return put_together(slot, parts, ranks).to(part.device());
}

at::Tensor GatheredValues::across_stages(const Flat& flat, const at::Tensor& own,
                                         const std::string& label) {
  const Members& stages = rank_.groups.pipeline();
  if (flat.placement.num_holders(Axis::kPipeline, rank_.mesh) == stages.size()) return own;
  const int first = flat.placement.on(Axis::kPipeline).holders.front();
  const at::Tensor values =
      first == stages.index ? own.to(at::kCPU, at::kFloat).contiguous() : zeros32(flat.numel);
  // The first rank of the list sends. It is the rank of the first stage that has the flat.
  Members ranks{{stages.ranks.at(static_cast<size_t>(first))}, 0};
  for (int stage = 0; stage < stages.size(); ++stage) {
    if (stage == first) continue;
    if (stage == stages.index) ranks.index = ranks.size();
    ranks.ranks.push_back(stages.ranks[static_cast<size_t>(stage)]);
  }
  rank_.channels.pipeline().broadcast(label, ranks, values.data_ptr(), flat.numel * 4);
  return own.defined() ? own : values;
}

at::Tensor GatheredValues::whole_on_first(const Slot& slot, const at::Tensor& part) {
  const Groups& groups = rank_.meshes.along(slot.cut.axis);
  Members ranks = groups.of({slot.cut.axis});
  const bool first = groups.data().index == 0 && ranks.index == 0;
  if (!slot.is_cut()) return first ? part : at::Tensor();
  if (groups.data().index > 0) ranks.index = -1;
  const at::Tensor parts = room_for_parts(slot, first ? ranks.size() : 1, 0, part);
  rank_.channels.stage().collect(concat("whole ", slot.name), ranks, parts.data_ptr(),
                                 slot.room * static_cast<int64_t>(parts.element_size()));
  return first ? put_together(slot, parts, ranks) : at::Tensor();
}

at::Tensor GatheredValues::part_of(const Slot& slot, const at::Tensor& whole) const {
  if (!slot.is_cut()) return whole;
  const Members& ranks = rank_.meshes.along(slot.cut.axis).of({slot.cut.axis});
  std::vector<at::Tensor> parts;
  for (const auto& [first, end] : slot.cut.ranges(ranks.index, ranks.size())) {
    parts.push_back(whole.narrow(slot.cut.dim, first, end - first));
  }
  return at::cat(parts, slot.cut.dim).contiguous();
}

void GatheredValues::show(Flat& flat) {
  if (flat.rest().place == rank_.whole()) {
    flat.attach(flat.rest().one().data());
  } else {
    flat.detach();
  }
}

// Writes the resting parameters from fp32 values that are placed as in `at`.
void GatheredValues::set_rest(Flat& flat, const Placement& at, char* values,
                              const std::string& label) {
  Placement from = at;
  from.dtype = Dtype::kFp32;
  Buffer& rest = flat.rest().one();
  for (Slot& slot : flat.slots) slot.given = 0;
  rank_.traffic.make_room(rest, mem::Account::kParam);
  from.tier = rank_.whole().tier;
  Walk walk = rank_.walk_on_host(from, hops(from, flat.rest().place));
  const device::Device* owner = rest.data().device;
  const at::Tensor made =
      at::empty({owner == nullptr ? 0 : rest.bytes()}, at::TensorOptions(at::kByte));
  const device::Address to = owner == nullptr ? rest.data() : device::Address(made.data_ptr());
  walk.add(rank_.meshes.of(flat), {values, to, Dtype::kFp32, rest.dtype, flat.numel});
  walk.run(rank_.channels.stage(), label);
  if (owner != nullptr) device::copy(rest.data(), to, rest.bytes());
  renew_base(rank_, flat);
  show(flat);
  rank_.traffic.put_back(rest);
}

void GatheredValues::restore(int unit, Flat& flat, const Placement& place, char* masters) {
  for (ChunkState& chunk : flat.chunks) {
    Buffer& master = chunk.optim.front().buffers.front();
    if (!master.exists()) continue;
    rank_.traffic.settle();  // at most one chunk is in memory beside the masters
    rank_.traffic.make_room(master, mem::Account::kOptim);
    device::copy(master.data(), masters + chunk.begin * 4, master.bytes());
    rank_.traffic.put_back(master);
  }
  set_rest(flat, place, masters, concat("restore u", unit));
}

void GatheredValues::take_edits(int index) {
  for (Flat& flat : rank_.units[index].flats) {
    if (rank_.users_write(flat)) write(flat, 0, flat.numel, flat.rest().one().data());
  }
}

void GatheredValues::publish(int index) {
  for (Flat& flat : rank_.units[index].flats) {
    if (!flat.trainable) continue;
    if (rank_.keeps_master(flat) || !rank_.table.publish().empty()) {
      const Placement place = rank_.table.master();
      const at::Tensor masters = zeros32(rank_.numel_of(place, flat));
      own_masters(flat, bytes_of(masters));
      set_rest(flat, place, bytes_of(masters), concat("publish u", index));
    }
    for (Slot& slot : flat.slots) {
      slot.param.unsafeGetTensorImpl()->bump_version();
      slot.version = slot.param._version();
    }
  }
  rank_.traffic.settle();
}

std::vector<std::pair<int64_t, int64_t>> GatheredValues::kept(const Flat& flat) const {
  const Placement& rest = flat.rest().place;
  const int64_t begin = rank_.begin_of(rest, flat);
  std::vector<std::pair<int64_t, int64_t>> ranges = {{begin, begin + rank_.numel_of(rest, flat)}};
  for (const ChunkState& chunk : flat.chunks) {
    const int64_t first = rank_.begin_of(chunk.optim.front().place, flat) + chunk.begin;
    ranges.emplace_back(first, first + chunk.numel);
  }
  std::sort(ranges.begin(), ranges.end());
  std::vector<std::pair<int64_t, int64_t>> joined;  // ranges that overlap are read once
  for (const auto& [first, end] : ranges) {
    if (joined.empty() || first > joined.back().second) {
      joined.emplace_back(first, end);
    } else {
      joined.back().second = std::max(joined.back().second, end);
    }
  }
  return joined;
}

void GatheredValues::adopt(Flat& flat, const at::Tensor& full, const std::string& label) {
  set_rest(flat, rank_.whole(), bytes_of(full), label);
  for (ChunkState& chunk : flat.chunks) {
    std::vector<Buffer>& buffers = chunk.optim.front().buffers;
    const Placement& place = chunk.optim.front().place;
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (!buffers[i].exists()) continue;
      rank_.traffic.settle();  // at most one buffer is in memory beside the full values
      rank_.traffic.make_room(buffers[i], mem::Account::kOptim);
      const int64_t first = rank_.begin_of(place, flat) + chunk.begin;
      if (i == 0) {
        device::copy(buffers[i].data(), bytes_of(full) + first * 4, buffers[i].bytes());
      } else {
        device::zero(buffers[i].data(), buffers[i].bytes());
      }
      rank_.traffic.put_back(buffers[i]);
    }
  }
  rank_.traffic.settle();
}

// Replaces a gathered copy by the values at rest, decoded.
void GatheredValues::show_rounded(Flat& flat, Buffer& whole, const std::string& label) {
  const at::Tensor full =
      read(flat.rest().one(), flat.rest().place, mem::Account::kParam, flat, label);
  const device::Device* const owner = whole.data().device;
  const at::Tensor there = device::brought({bytes_of(full)}, Dtype::kFp32, flat.numel, owner);
  device::take(whole.data(), whole.dtype, device::address_of(there, owner), Dtype::kFp32,
               flat.numel, false);
}

void GatheredValues::refresh(int index) {
  updates_.finish();
  for (Flat& flat : rank_.units[index].flats) {
    Buffer& whole = find(flat.params, rank_.whole())->one();
    const at::Tensor values = on_host(whole);
    rank_.channels.stage().broadcast(concat("refresh u", index), rank_.replicas(flat),
                                     bytes_of(values), whole.bytes());
    if (whole.data().device != nullptr) device::copy(whole.data(), bytes_of(values), whole.bytes());
    if (flat.quantized) refuse_nonfinite(flat, values);
    write(flat, 0, flat.numel, whole.data());
    if (flat.quantized) show_rounded(flat, whole, concat("rounded u", index));
    for (Slot& slot : flat.slots) {
      slot.version = slot.param._version();
      flat.renew_print(slot);
      slot.given = 0;  // the slot has the first rank's values now
    }
  }
}

void GatheredValues::refine(Flat& flat, const at::Tensor& values, const std::string& label) {
  updates_.finish();
  rank_.channels.stage().broadcast(label, rank_.replicas(flat), bytes_of(values),
                                   static_cast<int64_t>(values.nbytes()));
  const auto rounded = [&](const at::Tensor& one) {
    return one.to(device::scalar_type(flat.dtype));
  };
  for (ChunkState& chunk : flat.chunks) {
    exec::Copy& copy = chunk.optim.front();
    Buffer& master = copy.buffers.front();
    if (!master.exists()) continue;
    rank_.traffic.fetch(master, mem::Account::kOptim);
    rank_.traffic.wait_read(master);
    rank_.traffic.changes(master);
    const at::Tensor kept = on_host(master);
    const int64_t first = rank_.begin_of(copy.place, flat) + chunk.begin;
    const at::Tensor loaded = values.narrow(0, first, master.numel);
    at::Tensor seen = rounded(kept);
    if (rank_.cells.base) {
      const int64_t begin = rank_.begin_of(flat.rest().place, flat);
      seen = on_host(flat.rest().one()).narrow(0, first - begin, master.numel);
    }
    const at::Tensor made = at::where(seen.eq(rounded(loaded)), loaded, kept);
    device::copy(master.data(), bytes_of(made), master.bytes());
    rank_.traffic.put_back(master);
    rank_.traffic.settle();
  }
}

void GatheredValues::write(Flat& flat, int64_t first, int64_t numel, device::Address values) {
  const int64_t size = flat.element_bytes();
  const int64_t owned = rank_.begin_of(rank_.cells.optim_update, flat);
  const auto into = [&](Buffer& buffer, int64_t begin, mem::Account account) {
    const int64_t from = std::max(first, begin);
    const int64_t to = std::min(first + numel, begin + buffer.numel);
    if (from >= to) return;
    rank_.traffic.fetch(buffer, account);
    rank_.traffic.wait_read(buffer);
    rank_.traffic.changes(buffer);
    const device::Device* owner = buffer.data().device;
    const at::Tensor seen =
        device::brought(values + (from - first) * size, flat.dtype, to - from, owner);
    const device::Address edits = device::address_of(seen, owner);
    if (is_quantized(buffer.dtype)) {
      // Blocks without a written value keep their codes: decoded to fp32, they encode to the same.
      const at::Tensor all =
          device::decoded(buffer.data(), buffer.dtype, Dtype::kFp32, buffer.numel, owner);
      const device::Address values32 = device::address_of(all, owner);
      device::take_edits(values32 + (from - begin) * 4, Dtype::kFp32, edits, flat.dtype, to - from);
      device::recode(buffer.data(), buffer.dtype, values32, Dtype::kFp32, buffer.numel);
      rank_.traffic.put_back(buffer);
      return rank_.traffic.settle();
    }
    const device::Address kept = buffer.at(from - begin);
    if (account == mem::Account::kOptim) {
      exec::take_edits(rank_, flat, {edits, from - owned, to - from}, kept);
    } else {
      device::take_edits(kept, buffer.dtype, edits, flat.dtype, to - from);
    }
    rank_.traffic.put_back(buffer);
    rank_.traffic.settle();
  };
  const Placement& rest = flat.rest().place;
  if (rank_.whole() != rest) {
    into(flat.rest().one(), rank_.begin_of(rest, flat), mem::Account::kParam);
  }
  for (ChunkState& chunk : flat.chunks) {
    Buffer& master = chunk.optim.front().buffers.front();
    const int64_t begin = rank_.begin_of(chunk.optim.front().place, flat) + chunk.begin;
    if (master.exists()) into(master, begin, mem::Account::kOptim);
  }
}

// Compares a gathered copy on a device with the resting shard. The answer stays on the device until
// the norm or resolve_doubts() reads it.
void GatheredValues::doubt(const UnitState& unit, const Flat& flat, Buffer& own,
                           device::Address seen) {
  const device::Device* owner = seen.device;
  const bool quantized = is_quantized(own.dtype);
  at::Tensor kept = quantized ? device::decoded(own.data(), own.dtype, flat.dtype, own.numel, owner)
                              : device::brought(own.data(), own.dtype, own.numel, owner);
  rank_.traffic.let_go(own);
  const Dtype first = quantized ? flat.dtype : own.dtype;
  Dtype dtype = first;
  if (!unit.codings.empty()) {
    dtype = flat.dtype;
    kept = device::coded(device::address_of(kept, owner), first, dtype, own.numel, unit.codings);
  }
  const at::Tensor edits =
      device::edited_on_device(device::address_of(kept, owner), dtype, seen, flat.dtype, own.numel);
  for (Doubt& known : rank_.doubts) {
    if (known.flat != &flat) continue;
    known.edits = known.edits.logical_or(edits);
    return;
  }
  rank_.doubts.push_back({&flat, edits});
}

std::string GatheredValues::resolve_doubts() {
  std::vector<at::Tensor> counts;
  for (const Doubt& one : rank_.doubts) counts.push_back(one.edits);
  const std::vector<Doubt> doubts = std::exchange(rank_.doubts, {});
  const std::vector<double> edits = device::read(counts);
  for (size_t i = 0; i < edits.size(); ++i) {
    if (edits[i] != 0.0) return doubts[i].flat->slots.front().name;
  }
  return "";
}

std::string GatheredValues::edited(int index) {
  const UnitState& unit = rank_.units[index];
  for (Flat& flat : rank_.units[index].flats) {
    const Placement& rest = flat.rest().place;
    if (rank_.whole() == rest) continue;
    const Buffer& whole = find(flat.params, rank_.whole())->one();
    const int64_t begin = rank_.begin_of(rest, flat);
    Buffer& own = flat.rest().one();
    rank_.traffic.fetch(own, mem::Account::kParam);
    rank_.traffic.wait_read(own);
    if (whole.data().device != nullptr) {
      doubt(unit, flat, own, whole.at(begin));
      continue;
    }
    mem::Lease decoded;
    device::Address exact = own.data();
    Dtype dtype = own.dtype;
    if (is_quantized(own.dtype)) {
      dtype = flat.dtype;
      decoded = rank_.tiers.host.take(buffer_bytes(dtype, own.numel), mem::Account::kParam);
      exact = decoded.data();
      device::recode(exact, dtype, own.data(), own.dtype, own.numel);
    }
    const char* kept = exact.host();
    at::Tensor rounded;
    if (!unit.codings.empty()) {
      const Dtype first = std::exchange(dtype, whole.dtype);
      rounded = device::coded(exact, first, dtype, own.numel, unit.codings);
      kept = bytes_of(rounded);
    }
    const int64_t at =
        device::host::first_edit(kept, dtype, whole.at(begin).host(), whole.dtype, own.numel);
    rank_.traffic.let_go(own);
    for (const Slot& slot : flat.slots) {
      if (at >= 0 && begin + at < slot.offset + slot.numel) return slot.name;
    }
  }
  return "";
}

}  // namespace penstock::exec
