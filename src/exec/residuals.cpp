#include "src/exec/residuals.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "src/device/kernels.h"
#include "src/exec/gradients.h"

namespace penstock::exec {

namespace {

// Returns the ranges of the flat to which this rank adds nothing, or null if there are none.
std::shared_ptr<const device::Residual::Ranges> idle_ranges(const Flat& flat) {
  auto ranges = std::make_shared<device::Residual::Ranges>();
  for (const Slot& slot : flat.slots) {
    if (!slot.touched) ranges->emplace_back(slot.offset, slot.offset + slot.numel);
  }
  return ranges->empty() ? nullptr : ranges;
}

// Returns the ranges of [begin, end) that belong to no parameter, counted from `begin`.
std::shared_ptr<const device::Residual::Ranges> gaps_in(const Flat& flat, int64_t begin,
                                                        int64_t end) {
  auto gaps = std::make_shared<device::Residual::Ranges>();
  const auto add = [&](int64_t from, int64_t to) {
    from = std::max(from, begin);
    to = std::min(to, end);
    if (from < to) gaps->emplace_back(from - begin, to - begin);
  };
  for (size_t i = 0; i < flat.slots.size(); ++i) {
    const Slot& slot = flat.slots[i];
    const bool last = i + 1 == flat.slots.size();
    add(slot.offset + slot.numel, last ? flat.numel : flat.slots[i + 1].offset);
  }
  return gaps;
}

}  // namespace

bool Residuals::used() const {
  return rank_.cells.residual && !lossy_sums(rank_.table, rank_.mesh).empty();
}

Buffer Residuals::room_for(const Flat& flat) const {
  const Placement& rest = *rank_.cells.residual;
  Buffer made;
  made.numel = rank_.numel_of(rest, flat);
  made.dtype = rest.dtype;
  made.tier = rest.tier;
  rank_.traffic.make_room(made, mem::Account::kGrad);
  return made;
}

// Restores the residual of a parameter without a gradient. No update uses the sum of this
// parameter, although a code without a zero left values in it.
void Residuals::restore(Flat& flat, const Slot& slot) {
  auto& [kept, next] = flat.residual;
  if (!next->memory) {  // an exact sum used all of the residual
    if (!kept.memory) return;
    next = room_for(flat);
    device::zero(next->data(), next->bytes());
  }
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

Travel::Fed Residuals::begin(Flat& flat, const Route& route, mem::Lease* retired) {
  const auto pass =
      rank_.cells.residual ? residual_pass(route, *rank_.cells.residual) : std::optional<size_t>();
  if (!pass) return {};
  const Placement& rest = *rank_.cells.residual;
  const Placement& addends = route.passes[*pass].from;
  Travel::Fed fed;
  fed.pass = *pass;
  fed.numel = rank_.numel_of(rest, flat);
  fed.offset = rank_.begin_of(rest, flat) - rank_.begin_of(addends, flat);
  for (const Axis axis : kDataAxes) {
    if (addends.on(axis) != rest.on(axis)) {
      fed.factor *= static_cast<float>(rank_.meshes.of(flat).mesh.size(axis));
    }
  }
  auto& [kept, next] = flat.residual;
  Buffer& last = next ? *next : kept;
  device::Residual& values = fed.values;
  values.dtype = rest.dtype;
  if (last.memory) {
    values.before = last.data();
    values.idle = idle_ranges(flat);
    values.first = rank_.begin_of(rest, flat);
  }
  if (!route.passes[*pass].wire.lossy() && !values.idle) {
    if (next) *retired = std::move(next->memory);
    next.emplace();
    return fed;
  }
  if (!next || !next->memory) next = room_for(flat);
  values.after = next->data();
  if (route.passes[*pass].wire.code == Code::kSign) {
    const Placement& sum = route.passes[*pass].to;
    const int64_t begin = rank_.begin_of(sum, flat);
    fed.gaps = gaps_in(flat, begin, begin + rank_.numel_of(sum, flat));
  }
  return fed;
}

Placement Residuals::saved() const {
  Placement place = *rank_.cells.residual;
  place.tier = Tier::kDevice;
  place.dtype = Dtype::kFp32;
  bool nests = true;  // shards over an outer axis contain the shards over inner axes
  for (auto axis = kShardOrder.rbegin(); axis != kShardOrder.rend(); ++axis) {
    if (place.on(*axis) == Layout::kSharded) {
      nests = false;
    } else if (place.on(*axis) == Layout::kPartial) {
      place.on(*axis) = nests ? Layout::kSharded : Layout::kReplicated;
    }
  }
  return normalize(place, rank_.mesh);
}

at::Tensor Residuals::mean(const Flat& flat, const std::string& label) {
  const Buffer& kept = flat.residual.kept;
  if (rank_.on_accelerator()) rank_.tiers.computes.synchronize();
  Placement from = *rank_.cells.residual;
  from.tier = Tier::kDevice;
  from.dtype = Dtype::kFp32;
  at::Tensor own = at::zeros({rank_.numel_of(from, flat)}, at::TensorOptions(at::kFloat));
  if (kept.memory) own.copy_(device::brought(kept.data(), kept.dtype, kept.numel, nullptr));
  const Placement to = saved();
  at::Tensor part = at::empty({rank_.numel_of(to, flat)}, at::TensorOptions(at::kFloat));
  Walk walk = rank_.walk_on_host(from, hops(from, to));
  walk.add(rank_.meshes.of(flat),
           {.from = own.data_ptr(), .to = part.data_ptr(), .numel = flat.numel});
  walk.run(rank_.channels.stage(), label);
  return part;
}

void Residuals::add_holders(const Flat& flat, const at::Tensor& part, const std::string& label) {
  for (const Axis axis : kModelAxes) {
    if (!flat.placement.is_partial(axis)) continue;
    add_up(rank_.channels.addends(flat, axis), device::address_of(part, nullptr), Dtype::kFp32,
           part.numel(), label);
  }
}

// A sum divides by the number of its addends. On an axis over which the mean is sharded, only one
// addend has this part and the others have zeros. On the other axes, every addend has this part.
void Residuals::set_mean(Flat& flat, const at::Tensor& part) {
  drop(flat);
  flat.residual.kept = {};
  if (!part.defined()) return;
  const Placement& rest = *rank_.cells.residual;
  const Placement mean = saved();
  int64_t addends = 1;
  for (const Axis axis : kDataAxes) {
    if (rest.on(axis) == Layout::kPartial && mean.on(axis) == Layout::kSharded) {
      addends *= rank_.meshes.of(flat).mesh.size(axis);
    }
  }
  Buffer& kept = flat.residual.kept = room_for(flat);
  device::zero(kept.data(), kept.bytes());
  const at::Tensor scaled =
      part.mul(static_cast<double>(addends) / flat.placement.num_addends(rank_.mesh));
  const int64_t first = rank_.begin_of(mean, flat) - rank_.begin_of(rest, flat);
  device::take(kept.at(first), kept.dtype, device::address_of(scaled, nullptr), Dtype::kFp32,
               scaled.numel(), /*accumulate=*/false);
  if (rank_.on_accelerator()) rank_.tiers.computes.synchronize();
}

// Residuals are kept for the divisor of a full window. A window that is closed early has a smaller
// divisor, so it used `kept` times `factor`. This function takes the excess back.
void Residuals::rescale(Flat& flat, double factor) {
  auto& [kept, next] = flat.residual;
  if (!next->memory && kept.memory) {
    next = room_for(flat);
    device::zero(next->data(), next->bytes());
  }
  if (!next->memory) return;
  const at::Tensor values = device::view(next->data(), next->dtype, next->numel);
  values.mul_(factor);
  if (kept.memory) values.add_(device::view(kept.data(), kept.dtype, kept.numel), 1.0 - factor);
}

void Residuals::commit(double factor) {
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      if (!flat.residual.next) continue;
      if (factor != 1.0) rescale(flat, factor);
      for (const Slot& slot : flat.slots) {
        if (!slot.touched) restore(flat, slot);
      }
      flat.residual.kept = std::move(*flat.residual.next);
      flat.residual.next.reset();
    }
  }
}

}  // namespace penstock::exec
