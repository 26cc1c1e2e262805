#pragma once
// Packing: decides which buffers of one collective are sent as one piece to each peer.
//
// [Note: Packing] A message costs more time than a copy of some KiB. So if at least two shards of a
// collective are small, they are packed together. The channel packs by this rule, and the simulator
// counts memory by the same rule. The time of gather and reduce with packing was measured, relative
// to the time without it, with two processes over gloo on two busy cores. The ratios by shard size
// are, for 8 buffers: 512 B 0.28-0.56, 16 KiB 0.6-0.8, 128 KiB 0.81-0.83, 512 KiB 0.86-0.95, 1 MiB
// 1.09-1.17; for 2 buffers: 16 KiB 0.8-0.9, 128 KiB 0.98-1.02, 256 KiB 0.94-1.71. Packing does not
// change the bits of results.
#include <cstdint>

namespace penstock {

inline constexpr int64_t kPackBytes = 128 << 10;

// Computes the packed size of one collective from the shard bytes of its buffers.
class Packing {
 public:
  void add(int64_t shard_bytes) {
    if (shard_bytes > kPackBytes) return;
    bytes_ += shard_bytes;
    ++num_;
  }
  // Returns the bytes of the packed piece; 0 if nothing is packed.
  int64_t piece(int64_t num_members) const { return num_members > 1 && num_ > 1 ? bytes_ : 0; }
  // Both return the bytes of memory for packing. A gather has one piece per member; a reduce sends
  // one piece to each peer and receives one from each peer.
  int64_t gather_bytes(int64_t num_members) const { return num_members * piece(num_members); }
  int64_t reduce_bytes(int64_t num_members) const {
    return 2 * (num_members - 1) * piece(num_members);
  }

 private:
  int64_t bytes_ = 0;
  int num_ = 0;
};

}  // namespace penstock
