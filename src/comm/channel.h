#pragma once
// Channel: the collectives of one lane, made of a group's exchanges. Used by one thread at a time.
//
// [Note: Cross-check] Each collective's tag is a hash of (channel, training step, sequence number,
// label, sizes). Ranks that disagree on any of these never match, so a divergence cannot mix up
// data: both sides wait, and end at the timeout with an error that shows each rank's position.
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

// What a collective is called: the plan's text of its step, with its hash. Made once, when a plan
// is prepared; copies share the text, also with the roll call's thread, which may outlive the plan.
// Calls that are made once pass a string.
struct Label {
  Label() = default;
  Label(std::string text);                               // NOLINT(google-explicit-constructor)
  Label(const char* text) : Label(std::string(text)) {}  // NOLINT(google-explicit-constructor)

  std::shared_ptr<const std::string> text;
  uint64_t hash = 0;
};

// A full buffer of members.size() equal shards; this rank's shard is in its place already.
struct GatherBuffer {
  device::Address full;
  int64_t shard_bytes = 0;
};

// `partial` holds numel addends; shard `index` of the sum over the members, times `scale`, goes to
// `result` (which may be that shard of `partial`), added to what is there when `accumulate`.
// `scratch` takes (members - 1) shards of `dtype`, and of a device's memory one more.
struct ReduceBuffer {
  device::Address partial, scratch, result;
  Dtype dtype = Dtype::kFp32, result_dtype = Dtype::kFp32;
  int64_t numel = 0;
  float scale = 1.0F;
  bool accumulate = false;
  // Where not null: the sum of squares of the values written to this rank's shard, as of
  // host::sum_squares. Not finite when one of them is not. In host memory only.
  double* squares = nullptr;
};

// Memory that a caller lends, of the kind that the buffers are in.
struct Staging {
  device::Address data;
  int64_t bytes = 0;
};

// [Note: Between devices] Buffers of a device whose group exchanges host memory go through pinned
// memory: the lane waits on the host for what it sends, and what arrives is copied behind its back.
//
// [Note: Many ranks] Over host memory up to kDirect members send each other their shards in one
// round. More of them gather small shards by doubling, in log2(members) rounds, and larger ones
// around a ring: of each node one rank sends to another node, all else stays inside. A broadcast is
// a binomial tree. Sums stay one round of direct sends, which moves no byte more than a ring and
// adds up in member order, in fp32; what spares the links between nodes is the plan's (sum_wide()).
//
// Once warm, a collective allocates nothing itself and makes no text (share() does both).
//
// [Note: Tiles] Where the group hands over what comes tile by tile (Group::exchange_tiles), a shard
// is added up so, while its parts are in the cache: the scratch is not used. The bits are the same.
//
// [Note: Staging] Where several small buffers travel together (src/place/packing.h) and the caller
// lends memory, they are packed into one piece for each peer; large ones still go from and to their
// own places. All ranks must lend alike.
class Channel {
 public:
  // Bytes to lend: 0 where nothing would be packed. all_reduce needs what reduce_scatter does.
  static int64_t staging_bytes(const Members& members, const std::vector<GatherBuffer>& buffers);
  static int64_t staging_bytes(const Members& members, const std::vector<ReduceBuffer>& buffers);

  // `shown`: its name on the board, where that of another thread's is the same.
  Channel(Group& group, std::string name, const std::string& shown = "");

  // Collectives of device memory among these members are that back end's. The members outlive it.
  void use(const Members& members, std::shared_ptr<DeviceCollectives> back_end);
  // Of all collectives so far that were a device's: ranks that made the same ones have the same.
  // (Those through the host are compared one by one.)
  uint64_t history() const { return history_; }

  void set_step(int64_t step) { step_ = step; }  // for tags and messages
  // After the group's renew(): ranks may have come from different collectives.
  void renew() { step_ = sequence_ = 0; }
  // Calls of Group::exchange since construction. From any thread.
  int64_t exchanges() const { return sequence_.load(std::memory_order_relaxed); }

  static constexpr int kDirect = 8;                // members
  static constexpr int64_t kByDoubling = 8 << 10;  // bytes of all shards of a member

  // All buffers travel together. `staging` is the call's own until it returns; empty: no packing.
  void all_gather(const Label& label, const Members& members,
                  const std::vector<GatherBuffer>& buffers, const Staging& staging = {});
  // The scratch of a packed buffer is not used.
  void reduce_scatter(const Label& label, const Members& members,
                      const std::vector<ReduceBuffer>& buffers, const Staging& staging = {});
  // In place on `partial` (same dtype); `result` is not used.
  void all_reduce(const Label& label, const Members& members,
                  const std::vector<ReduceBuffer>& buffers, const Staging& staging = {});
  // The i-th piece of `from` goes to member i, and the i-th of `to` comes from it: `bytes` each.
  void all_to_all(const Label& label, const Members& members, const void* from, void* to,
                  int64_t bytes);
  // Member 0's bytes to all.
  void broadcast(const Label& label, const Members& members, void* data, int64_t bytes);
  // Shards to the first owner: `owners` has the rank of each shard, in order. There `data` has room
  // for all of them, with its own in place; elsewhere it is this rank's. A rank that owns none
  // (index < 0) takes part by calling.
  void collect(const Label& label, const Members& owners, void* data, int64_t shard_bytes);
  // Each member's payload (same size everywhere), in member order.
  std::vector<std::string> share(const Label& label, const Members& members,
                                 const std::string& payload);

  // Exchanges are events of the thread that makes them. May be null.
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
  RuntimeFault lost(const Position& position, const std::string& error);
  DeviceCollectives* on_device(const Members& members, device::Address buffer);
  void queue(const Label& label, const device::Device& device, DeviceCollectives& back_end,
             const std::function<void()>& collective);
  void reduce_on_device(const Label& label, const Members& members,
                        const std::vector<ReduceBuffer>& buffers, DeviceCollectives& back_end);
  void sum_on_device(const Members& members, const std::vector<ReduceBuffer>& buffers,
                     DeviceCollectives& back_end);

  Group& group_;
  const Label name_;
  const int lane_;                     // of the group's board
  std::atomic<int64_t> sequence_ = 0;  // of the next exchange
  int64_t step_ = 0;
  // Of the collective under way; members, so that their memory is reused.
  struct PeerBytes {
    int peer = 0;
    device::Address data;
    int64_t bytes = 0;
  };
  std::vector<PeerBytes> sends_, receives_;
  std::vector<Piece> sent_, received_;  // as the group takes them
  uint64_t history_ = 0;
  std::vector<std::pair<const Members*, std::shared_ptr<DeviceCollectives>>> on_device_;
  uint64_t sizes_ = 0;  // hash of the bytes of each buffer
  std::vector<const void*> sources_;
  TileSource tiles_;
  std::vector<const ReduceBuffer*> tiled_;  // what its pieces are of
  std::vector<ReduceBuffer> reduces_;
  std::vector<GatherBuffer> gathers_, travel_;
};

}  // namespace penstock::comm
