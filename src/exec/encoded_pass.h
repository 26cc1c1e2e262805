#pragma once
// EncodedPass: one collective of a walk whose values travel by a lossy wire ([Note: Wires]). The
// pieces of all buffers for one member are encoded one after another, so they travel together.
#include <cstdint>
#include <vector>

#include "src/comm/channel.h"
#include "src/device/wire_codec.h"
#include "src/place/groups.h"
#include "src/place/placement.h"

namespace penstock::exec {

class EncodedPass {
 public:
  // `members` must outlive the pass.
  EncodedPass(const Wire& wire, const Members& members) : wire_(wire), members_(members) {}

  // Adds a gather of shards of `numel` values. `own` is this rank's shard; `full` receives the
  // shards of all members. `own` may be in its place in `full`.
  void add_gather(device::Address own, device::Address full, Dtype dtype, int64_t numel);
  // Adds a sum. Its scratch is not used. If `everywhere`, all shards of the sum replace `partial`.
  void add_sum(const comm::ReduceBuffer& buffer, bool everywhere);

  // Returns the bytes that run() needs.
  int64_t room_bytes() const;
  void run(comm::Channel& channel, const comm::Label& label, device::Address room);

 private:
  struct Part {
    device::Address own{}, full{};  // of a gather
    comm::ReduceBuffer sum{};       // of a sum
    Dtype dtype = Dtype::kFp32;
    int64_t numel = 0;   // of one shard
    int64_t offset = 0;  // in an encoded piece, in bytes
    int64_t first = 0;   // in an encoded piece, in values
  };
  void add(Part part);
  void gather(comm::Channel& channel, const comm::Label& label, device::Address room);
  void sum(comm::Channel& channel, const comm::Label& label, device::Address room);
  device::Address shard(const Part& part, device::Address full, int member) const;

  const Wire wire_;
  const Members& members_;
  std::vector<Part> parts_;
  int64_t numel_ = 0;  // values for one member
  int64_t piece_ = 0;  // their encoded bytes
  bool sums_ = false, everywhere_ = false;
};

}  // namespace penstock::exec
