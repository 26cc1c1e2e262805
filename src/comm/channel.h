#pragma once
// Channel: the collectives of one lane, made of a group's exchanges. Used by one thread at a time.
//
// [Note: Cross-check] Each collective's tag is a hash of (channel, sequence number, step text,
// sizes). Ranks that disagree on any of these never match, so a divergence cannot mix up data: both
// sides wait, and end at the timeout with an error that shows each rank's position.
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/group.h"
#include "src/place/placement.h"

namespace penstock::comm {

// The ranks of one collective, in shard order, and which of them this rank is.
struct Members {
  std::vector<int> ranks;
  int index = 0;
  int size() const { return static_cast<int>(ranks.size()); }
};

// A full buffer of members.size() equal shards; this rank's shard is in its place already.
struct GatherBuffer {
  void* full = nullptr;
  int64_t shard_bytes = 0;
};

// `partial` holds numel addends; shard `index` of the sum over the members, times `scale`, goes to
// `result` (which may be that shard of `partial`), added to what is there when `accumulate`.
// `scratch` takes (members - 1) shards of `dtype`.
struct ReduceBuffer {
  void* partial = nullptr;
  void* scratch = nullptr;
  void* result = nullptr;
  Dtype dtype = Dtype::kFp32, result_dtype = Dtype::kFp32;
  int64_t numel = 0;
  float scale = 1.0F;
  bool accumulate = false;
};

class Channel {
 public:
  Channel(Group& group, std::string name);

  void set_step(int64_t step) { step_ = step; }  // for messages
  // All buffers travel together. `label` is the plan's text of the step.
  void all_gather(const std::string& label, const Members& members,
                  const std::vector<GatherBuffer>& buffers);
  void reduce_scatter(const std::string& label, const Members& members,
                      const std::vector<ReduceBuffer>& buffers);
  // In place on `partial` (same dtype); `result` is not used.
  void all_reduce(const std::string& label, const Members& members,
                  const std::vector<ReduceBuffer>& buffers);
  // Member 0's bytes to all.
  void broadcast(const std::string& label, const Members& members, void* data, int64_t bytes);
  // Each member's payload (same size everywhere), in member order.
  std::vector<std::string> share(const std::string& label, const Members& members,
                                 const std::string& payload);

 private:
  void exchange(const std::string& label, const std::vector<Piece>& sends,
                const std::vector<Piece>& receives);

  Group& group_;
  const std::string name_;
  int64_t sequence_ = 0;
  int64_t step_ = 0;
};

}  // namespace penstock::comm
