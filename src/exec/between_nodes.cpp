#include "src/exec/between_nodes.h"

#include <algorithm>
#include <vector>

#include "src/device/kernels.h"

namespace penstock::exec {

namespace {

constexpr int64_t kRoomBytes = 32 << 20;
constexpr int64_t kPieceNumel = 128;  // pieces are multiples of this: 256 bytes or more

}  // namespace

bool meets_between_nodes(const Rank& rank, const Placement& place) {
  return rank.connected && !place.partial() && place.on(Axis::kNode) == Layout::kSharded &&
         rank.mesh.size(Axis::kNode) > 1;
}

void gather_between_nodes(Rank& rank, Lanes& lanes, const FlatShard& shard,
                          const comm::Label& label, char* full, Dtype dtype) {
  std::vector<Axis> axes = {Axis::kNode};
  if (shard.place.on(Axis::kLocal) == Layout::kSharded) axes.push_back(Axis::kLocal);
  const Members& members = shard.over.groups.of(axes);
  const int64_t size = dtype_bytes(shard.place.dtype), numel = shard.numel / members.size();
  const int64_t pieces = kRoomBytes / size / members.size() / kPieceNumel;
  const int64_t most = std::min(numel, std::max<int64_t>(1, pieces) * kPieceNumel);
  const mem::Lease room =
      rank.tiers.device.take(most * size * members.size(), mem::Account::kBuffers);
  for (int64_t begin = 0; begin < numel; begin += most) {
    const int64_t count = std::min(most, numel - begin), bytes = count * size;
    const std::shared_ptr<comm::LaunchTurn> turn = lanes.take_turn();
    const auto gather = [&] {
      device::copy(room.data() + members.index * bytes, shard.own + begin * size, bytes);
      turn->wait();
      rank.channels.gather.all_gather(label, members, {{room.data(), bytes}});
      turn->leave();
    };
    lanes.gather.submit(gather).wait();
    for (int i = 0; i < members.size() && full != nullptr; ++i) {
      char* const to = full + (i * numel + begin) * dtype_bytes(dtype);
      device::take(to, dtype, room.data() + i * bytes, shard.place.dtype, count, false);
    }
  }
  rank.tiers.computes.synchronize();
}

}  // namespace penstock::exec
