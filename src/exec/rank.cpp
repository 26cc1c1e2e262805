#include "src/exec/rank.h"

namespace penstock::exec {

Rank::Rank(const Table& cells, const Mesh& ranks, Group& peers, mem::Tiers& memory,
           std::vector<UnitState> parts)
    : table(cells.on(ranks)),
      grads_in_chunks(table.grads_come_in_chunks()),
      publishes_chunks(table.publishes_chunks()),
      has_master{table.has_master(Dtype::kFp32), table.has_master(Dtype::kBf16),
                 table.has_master(Dtype::kFp16)},
      mesh(ranks),
      groups(ranks, peers.rank()),
      group(peers),
      tiers(memory),
      units(std::move(parts)),
      traffic(memory),
      gather_channel(peers, "gather"),
      reduce_channel(peers, "reduce"),
      control_channel(peers, "control") {
  for (UnitState& unit : units) {
    unit.params = Copies::resting(cell(Role::kParam, Phase::kRest));
    unit.grads = Copies::moving();
    unit.attached = cell(Role::kParam, Phase::kRest) == whole();
  }
}

Buffer Rank::buffer_at(const Placement& place, const Flat& flat) const {
  Buffer buffer;
  buffer.numel = numel_of(place, flat);
  buffer.dtype = dtype_of(place, flat);
  buffer.tier = place.tier;
  return buffer;
}

void Rank::claim_params(Flat& flat) {
  const Placement& rest = cell(Role::kParam, Phase::kRest);
  const Placement& held = cell(Role::kParam, Phase::kHold);
  // Room for all copies there can be: lanes hold on to the resting one while others come and go.
  flat.params.reserve(4);
  std::vector<Placement> places = {rest};
  if (held.tier == Tier::kDisk && held != rest) places.push_back(held);
  for (const Placement& place : places) {
    Copy& copy = flat.params.emplace_back();
    copy.place = place;
    copy.valid = place == rest;
    copy.buffers.push_back(buffer_at(place, flat));
    reserve(copy.one());
  }
}

void Rank::claim_state(Flat& flat, int num_chunks, int num_moments) {
  const Placement& held = cell(Role::kGrad, Phase::kHold);
  const Placement& optim = cell(Role::kOptim, Phase::kRest);
  if (held.tier == Tier::kDisk) {
    Copy& copy = flat.grads.emplace_back();
    copy.place = held;
    copy.valid = false;
    copy.buffers.push_back(buffer_at(held, flat));
    reserve(copy.one());
  }
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
    for (int i = 0; i <= num_moments; ++i) {
      Buffer& buffer = state.buffers.emplace_back();
      buffer.dtype = i == 0 ? Dtype::kFp32 : optim.dtype;
      buffer.tier = optim.tier;
      if (i > 0 || table.has_master(flat.dtype)) buffer.numel = chunk.numel;
      reserve(buffer);
    }
    if (publishes_chunks) chunk.param = part_of(flat.rest().one(), begin, chunk.numel);
    if (grads_in_chunks) chunk.gradient = part_of(flat.grads.front().one(), begin, chunk.numel);
  }
}

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
