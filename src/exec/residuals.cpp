#include "src/exec/residuals.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "src/device/kernels.h"

namespace penstock::exec {

namespace {

const Pass* first_sum(const Route& route) {
  const auto found = std::find_if(route.passes.begin(), route.passes.end(),
                                  [](const Pass& pass) { return pass.sums(); });
  return found == route.passes.end() ? nullptr : &*found;
}

// Returns the ranges of the flat to which this rank adds nothing; null if there are none.
std::shared_ptr<const device::Residual::Ranges> idle_ranges(const Flat& flat) {
  auto ranges = std::make_shared<device::Residual::Ranges>();
  for (const Slot& slot : flat.slots) {
    if (!slot.touched) ranges->emplace_back(slot.offset, slot.offset + slot.numel);
  }
  return ranges->empty() ? nullptr : ranges;
}

}  // namespace

bool Residuals::belong_to(const Route& route) const {
  const Pass* const sum = first_sum(route);
  return rank_.cells.residual && sum != nullptr &&
         sum->from.layout == rank_.cells.residual->layout;
}

Buffer Residuals::room_for(const Flat& flat) const {
  const Placement& rest = *rank_.cells.residual;
  Buffer made;
  made.numel = rank_.numel_of(rest, flat);
  made.dtype = rest.dtype;
  made.tier = rest.tier;
  rank_.traffic.make_room(made, mem::Account::kOptim);
  return made;
}

// No update uses the sum of the parameter, in which a code without a zero left values.
void Residuals::restore(Flat& flat, const Slot& slot) {
  auto& [kept, next] = flat.residual;
  if (!next->memory) return;
  const int64_t begin = rank_.begin_of(*rank_.cells.residual, flat);
  const int64_t from = std::max(begin, slot.offset);
  const int64_t to = std::min(begin + next->numel, slot.offset + slot.numel);
  if (from >= to) return;
  const int64_t bytes = (to - from) * dtype_bytes(next->dtype);
  if (kept.memory) {
    device::copy(next->at(from - begin), kept.at(from - begin), bytes);
  } else {
    device::zero(next->at(from - begin), bytes);
  }
}

device::Residual Residuals::begin(Flat& flat, const Route& route, mem::Lease* retired) {
  if (!belong_to(route)) return {};
  auto& [kept, next] = flat.residual;
  Buffer& last = next ? *next : kept;
  device::Residual residual{.dtype = rank_.cells.residual->dtype};
  if (last.memory) {
    residual.before = last.data();
    residual.idle = idle_ranges(flat);
    residual.first = rank_.begin_of(*rank_.cells.residual, flat);
  }
  if (!first_sum(route)->wire.lossy() && !residual.idle) {
    if (next) *retired = std::move(next->memory);
    next.emplace();
    return residual;
  }
  if (!next || !next->memory) {
    next = room_for(flat);
  }
  residual.after = next->data();
  return residual;
}

Placement Residuals::saved() const {
  Placement place = *rank_.cells.residual;
  place.tier = Tier::kDevice;
  place.dtype = Dtype::kFp32;
  bool nests = true;  // shards over an outer axis contain the shards over inner axes
  for (auto axis = kDataAxes.rbegin(); axis != kDataAxes.rend(); ++axis) {
    if (place.on(*axis) == Layout::kSharded) {
      nests = false;
    } else {
      place.on(*axis) = nests ? Layout::kSharded : Layout::kReplicated;
    }
  }
  return normalize(place, rank_.mesh);
}

at::Tensor Residuals::mean(const Flat& flat, const std::string& label) {
  const Buffer& kept = flat.residual.kept;
  if (!kept.memory) return {};
  if (rank_.on_accelerator()) rank_.tiers.computes.synchronize();
  const at::Tensor own =
      device::brought(kept.data(), kept.dtype, kept.numel, nullptr).to(at::kFloat, false, true);
  Placement from = *rank_.cells.residual;
  from.tier = Tier::kDevice;
  from.dtype = Dtype::kFp32;
  const Placement to = saved();
  at::Tensor part = at::empty({rank_.numel_of(to, flat)}, at::TensorOptions(at::kFloat));
  Walk walk = rank_.walk_on_host(from, hops(from, to));
  walk.add({.from = own.data_ptr(), .to = part.data_ptr(), .numel = flat.numel});
  walk.run(rank_.channels.stage(), label);
  return part;
}

// A sum divides by the number of its addends. Over axes that shard the mean, one of the addends has
// the part and the others have zeros there. Over the other axes, every addend has the part.
void Residuals::set_mean(Flat& flat, const at::Tensor& part) {
  drop(flat);
  flat.residual.kept = {};
  if (!part.defined()) return;
  const Placement& rest = *rank_.cells.residual;
  const Placement mean = saved();
  int64_t addends = 1;
  for (const Axis axis : kDataAxes) {
    if (rest.on(axis) == Layout::kPartial && mean.on(axis) == Layout::kSharded) {
      addends *= rank_.mesh.size(axis);
    }
  }
  Buffer& kept = flat.residual.kept = room_for(flat);
  device::zero(kept.data(), kept.bytes());
  const at::Tensor scaled = part.mul(addends);
  const int64_t first = rank_.begin_of(mean, flat) - rank_.begin_of(rest, flat);
  device::take(kept.at(first), kept.dtype, device::address_of(scaled, nullptr), Dtype::kFp32,
               scaled.numel(), /*accumulate=*/false);
  if (rank_.on_accelerator()) rank_.tiers.computes.synchronize();
}

void Residuals::commit() {
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      if (!flat.residual.next) continue;
      for (const Slot& slot : flat.slots) {
        if (!slot.touched) restore(flat, slot);
      }
      flat.residual.kept = std::move(*flat.residual.next);
      flat.residual.next.reset();
    }
  }
}

}  // namespace penstock::exec
