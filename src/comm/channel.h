#pragma once
// Channel: the collectives of one lane, made of the exchanges of a group. Used by one thread at a
// time.
//
// [Note: Cross-check] The tag of a collective is a hash of (channel, training step, sequence
// number, label, sizes). The tags of ranks that disagree on any of these never match, so ranks that
// diverge cannot exchange wrong data. All sides wait until the timeout instead, and the error shows
// the position of each rank.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "penstock/group.h"
#include "src/comm/device_collectives.h"
#include "src/device/address.h"
#include "src/place/groups.h"
#include "src/place/placement.h"
#include "src/trace/recorder.h"

namespace penstock::comm {

using penstock::Members;

// The name of a collective: the text of its plan line, and the hash of that text. A label is made
// once, when a plan is prepared. Copies share the text, because the roll call's thread may hold a
// copy after the plan is gone. A call outside a plan passes a string.
struct Label {
  Label() = default;
  Label(std::string text);                               // NOLINT(google-explicit-constructor)
  Label(const char* text) : Label(std::string(text)) {}  // NOLINT(google-explicit-constructor)

  std::shared_ptr<const std::string> text;
  uint64_t hash = 0;
};

// A buffer that consists of members.size() equal shards. Before the call, this rank's shard is
// already in its place.
struct GatherBuffer {
  device::Address full;
  int64_t shard_bytes = 0;
};

// `partial` holds `numel` values, which this rank adds to the sum. The sum over the members is
// multiplied by `scale`. This rank's shard of the sum is written to `result`, or added to `result`
// if `accumulate` is set. `result` may be the place of that shard in `partial`. `scratch` has room
// for (members - 1) shards of `dtype`, or for `members` shards if it is device memory.
struct ReduceBuffer {
  device::Address partial, scratch, result;
  Dtype dtype = Dtype::kFp32, result_dtype = Dtype::kFp32;
  int64_t numel = 0;
  float scale = 1.0F;
  bool accumulate = false;
  // If not null, receives the sum of squares of the values written to this rank's shard. This sum
  // has the same bits as the result of host::sum_squares, and is not finite if one of the values is
  // not finite. Host memory only.
  double* squares = nullptr;
};

// Memory that the caller provides for one call, on the same device as the buffers.
struct Staging {
  device::Address data;
  int64_t bytes = 0;
};

// [Note: Between devices] If the group exchanges host memory, buffers of a device are copied
// through pinned memory. The lane blocks until the data to send is in pinned memory. Received data
// is copied to the device asynchronously.
//
// [Note: Many ranks] Over host memory, up to kDirect members send each other their shards in one
// round. With more members, small shards are gathered by doubling, in log2(members) rounds, and
// larger shards around a ring. In the ring, one rank of each node sends to the next node, and all
// other sends stay inside a node. A broadcast is a binomial tree. A sum is always one round of
// direct sends, which moves as many bytes as a ring does. It adds in fp32 in member order. The plan
// decides how sums use the links between nodes (sum_wide()).
//
// Except on its first call, a collective allocates no memory and builds no strings. Only share()
// does both on every call.
//
// [Note: Tiles] If the group delivers received data tile by tile (Group::exchange_tiles), each tile
// is summed while it is in the cache, and the scratch is not used. The result has the same bits.
//
// [Note: Staging] If several small buffers travel together (src/place/packing.h) and the caller
// provides staging memory, they are packed into one piece for each peer. Large buffers are sent and
// received in place. Either all ranks provide staging, or none does.
class Channel {
 public:
  // Returns the bytes of staging that a call can use, or 0 if nothing would be packed. all_reduce
  // needs as much staging as reduce_scatter.
  static int64_t staging_bytes(const Members& members, const std::vector<GatherBuffer>& buffers);
  static int64_t staging_bytes(const Members& members, const std::vector<ReduceBuffer>& buffers);

  // `shown`: the channel's name on the board. It is needed if a channel of another thread has the
  // same `name`.
  Channel(Group& group, std::string name, const std::string& shown = "");

  // From now on, collectives on device memory among `members` use `back_end`. `members` is compared
  // by address and must outlive the channel.
  void use(const Members& members, std::shared_ptr<DeviceCollectives> back_end);
  // Returns a hash of all device collectives so far. It is equal on ranks that made the same
  // collectives. Collectives through the host are not part of this hash, because the tag of each of
  // them is checked.
  uint64_t history() const { return history_; }

  void set_step(int64_t step) { step_ = step; }  // used in tags and error texts
  int64_t step() const { return step_; }
  // Must be called after the group's renew(). Resets the step and the sequence number, because the
  // ranks may have made different numbers of collectives before.
  void renew() { step_ = sequence_ = 0; }
  // Number of Group::exchange calls since construction. Any thread.
  int64_t exchanges() const { return sequence_.load(std::memory_order_relaxed); }

  // Up to this many members send their shards directly.
  static constexpr int kDirect = 8;
  // Shards are gathered by doubling if those of one member have at most this many bytes in total.
  static constexpr int64_t kByDoubling = 8 << 10;

  // All buffers travel together. Nothing else may use `staging` until the call returns. If
  // `staging` is empty, nothing is packed.
  void all_gather(const Label& label, const Members& members,
                  const std::vector<GatherBuffer>& buffers, const Staging& staging = {});
  // The scratch of a packed buffer is not used.
  void reduce_scatter(const Label& label, const Members& members,
                      const std::vector<ReduceBuffer>& buffers, const Staging& staging = {});
  // Works in place on `partial`, in its dtype. `result` is not used.
  void all_reduce(const Label& label, const Members& members,
                  const std::vector<ReduceBuffer>& buffers, const Staging& staging = {});
  // Sends the i-th piece of `from` to member i. The i-th piece of `to` receives the data of member
  // i. Each piece has `bytes` bytes. This rank's piece must already be in `to`.
  void all_to_all(const Label& label, const Members& members, device::Address from,
                  device::Address to, int64_t bytes);
  // Sends `from` to the next member and receives the previous member's bytes in `to`. The last
  // member sends to member 0.
  void shift(const Label& label, const Members& members, device::Address from, device::Address to,
             int64_t bytes);
  // Sends the bytes of member 0 to all members.
  void broadcast(const Label& label, const Members& members, device::Address data, int64_t bytes);
  // Sends all shards to the first owner. `owners` lists the rank of each shard, in order. On the
  // first owner, `data` has room for all shards, and that owner's shard is already in place. On
  // other ranks, `data` is the rank's shard. Ranks that own no shard (index < 0) must also call
  // collect().
  void collect(const Label& label, const Members& owners, void* data, int64_t shard_bytes);
  // Returns the payloads of all members, in member order. All payloads must have the same size.
  std::vector<std::string> share(const Label& label, const Members& members,
                                 const std::string& payload);

  // Records each exchange as an event of the calling thread. May be null.
  std::shared_ptr<trace::Recorder> recorder;

 private:
  void start();
  void gather(const Label& label, const Members& members, const std::vector<GatherBuffer>& buffers);
  void add_gather(const Members& members, const GatherBuffer& buffer);
  void pass_on(const Label& label, const Members& members, const std::vector<GatherBuffer>& buffers,
               bool doubling);
  void add_reduce(const Members& members, const ReduceBuffer& buffer);
  void add_packed(const Members& members, const std::vector<ReduceBuffer>& buffers,
                  device::Address staging, int64_t packed);
  bool reduce_in_tiles(const Members& members, const std::vector<ReduceBuffer>& buffers,
                       const Staging& received, uint32_t tag);
  uint32_t begin(const Label& label);
  void exchange(const Label& label);
  void exchange(uint32_t tag);
  template <class Run>
  void meet(const Label& label, const Run& run);
  DeviceCollectives* on_device(const Members& members, device::Address buffer);
  void queue(const Label& label, const device::Device& device, DeviceCollectives& back_end,
             const std::function<void()>& collective);
  void reduce_on_device(const Label& label, const Members& members,
                        const std::vector<ReduceBuffer>& buffers, DeviceCollectives& back_end);

  Group& group_;
  const Label name_;
  const int lane_;                     // index on the group's board
  std::atomic<int64_t> sequence_ = 0;  // sequence number of the next exchange
  int64_t step_ = 0;
  // State of the current collective. It is kept in data members so that its memory is reused.
  struct PeerBytes {
    int peer = 0;
    device::Address data;
    int64_t bytes = 0;
  };
  std::vector<PeerBytes> sends_, receives_;
  std::vector<Piece> sent_, received_;  // in the form that a group exchanges
  uint64_t history_ = 0;
  std::vector<std::pair<const Members*, std::shared_ptr<DeviceCollectives>>> on_device_;
  uint64_t sizes_ = 0;  // hash of the bytes of each buffer
  std::vector<const void*> sources_;
  TileSource tiles_;
  std::vector<const ReduceBuffer*> tiled_;  // the buffer of each piece in tiles_
  std::vector<ReduceBuffer> reduces_;
  std::vector<GatherBuffer> gathers_, travel_;
};

}  // namespace penstock::comm
