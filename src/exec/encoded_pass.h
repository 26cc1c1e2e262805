#pragma once
// EncodedPass: a collective of a walk that sends its values by a lossy wire ([Note: Wires]). The
// pieces of all buffers for one member are encoded one after another, so they travel together.
//
// [Note: Noise] The random numbers of stochastic rounding depend on the flat's name, the step, the
// number of the backward in its window, the pass and the member's index. So they differ between
// addends, and a resumed run draws the same numbers. Ranks of other axes (tensor ranks, stages)
// draw the same numbers too, because they may add up equal gradients and must get equal sums.
#include <cstdint>
#include <memory>
#include <vector>

#include "src/comm/channel.h"
#include "src/device/wire_codec.h"
#include "src/place/groups.h"
#include "src/place/placement.h"

namespace penstock::exec {

class EncodedPass {
 public:
  // `members` must outlive the pass. `number`: the number of the pass in its walk.
  EncodedPass(const Wire& wire, const Members& members, uint64_t number)
      : wire_(wire), members_(members), number_(number) {}

  // Adds a gather of shards of `numel` values. `own` is this rank's shard; `full` receives the
  // shards of all members. `own` may be in its place in `full`, unless the wire sends deltas. In
  // that case, `full` has the old values of all shards, which are equal on all members.
  void add_gather(device::Address own, device::Address full, Dtype dtype, int64_t numel);
  // Adds a sum. Does not use the scratch of `buffer`. If `everywhere` is set, all shards of the sum
  // replace `partial`. `noise` depends on the flat and the backward.
  void add_sum(const comm::ReduceBuffer& buffer, bool everywhere, uint64_t noise);
  // Sets the residual of the sum that was added last, for all its addends. That sum must not be
  // `everywhere`. `gaps`: ranges of the result to be set to zero; null: none.
  void feed(const device::Residual& residual, std::shared_ptr<const device::Residual::Ranges> gaps);

  // Returns the bytes that run() needs.
  int64_t room_bytes() const;
  void run(comm::Channel& channel, const comm::Label& label, device::Address room);

 private:
  struct Encoding {
    device::Address own{}, full{};  // of a gather
    comm::ReduceBuffer sum{};       // of a sum
    Dtype dtype = Dtype::kFp32;
    int64_t numel = 0;   // of one shard
    int64_t offset = 0;  // in an encoded piece
    uint64_t noise = 0;
    device::Residual residual{};
    std::shared_ptr<const device::Residual::Ranges> gaps{};
  };
  void add(Encoding part);
  uint64_t key(const Encoding& part, int64_t step) const;
  void gather(comm::Channel& channel, const comm::Label& label, device::Address room);
  void sum(comm::Channel& channel, const comm::Label& label, device::Address room);
  device::Address shard(const Encoding& part, device::Address full, int member) const;

  const Wire wire_;
  const Members& members_;
  std::vector<Encoding> parts_;
  const uint64_t number_;
  int64_t piece_ = 0;  // encoded bytes for one member
  bool sums_ = false, everywhere_ = false;
};

}  // namespace penstock::exec
