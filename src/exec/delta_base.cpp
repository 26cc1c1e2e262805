#include "src/exec/delta_base.h"

namespace penstock::exec {

void renew_base(Rank& rank, Flat& flat) {
  if (!rank.cells.base || !flat.trainable) return;
  const Buffer& rest = flat.rest().one();
  const int64_t first =
      rank.begin_of(*rank.cells.base, flat) - rank.begin_of(flat.rest().place, flat);
  rank.traffic.make_room(flat.base, mem::Account::kParam);
  device::copy(flat.base.data(), rest.at(first), flat.base.bytes());
}

void renew_base(Rank& rank, const std::vector<int>& units) {
  for (const int unit : units) {
    for (Flat& flat : rank.units[unit].flats) renew_base(rank, flat);
  }
}

void take_edits(const Rank& rank, Flat& flat, const SeenValues& seen, device::Address masters) {
  if (!rank.cells.base) {
    return device::take_edits(masters, Dtype::kFp32, seen.at, flat.dtype, seen.numel);
  }
  const device::Address base = flat.base.at(seen.first);
  const at::Tensor here = device::brought(base, flat.dtype, seen.numel, masters.device);
  device::take_edits(masters, seen.at, device::address_of(here, masters.device), flat.dtype,
                     seen.numel);
  device::copy(base, seen.at, seen.numel * dtype_bytes(flat.dtype));
}

}  // namespace penstock::exec
