#pragma once
// ShmFabric: the connections of one rank to the other ranks of its host, through shared memory
// ([Note: Shared memory], layout.h). Exchanges run over it (exchange.h).
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/comm/process_watch.h"
#include "src/comm/shm/segment.h"
#include "src/comm/shm/span_cursor.h"

namespace penstock::comm {

// Owned by a group or a back end. It must outlive every exchange over it. Any thread may use it.
class ShmFabric {
 public:
  using Clock = std::chrono::steady_clock;

  // `pids`: the process id of each rank. In tests, ranks are threads of one process and share the
  // segment object.
  ShmFabric(std::shared_ptr<const ShmSegment> segment, int rank, std::vector<int64_t> pids);
  // Marks this rank as closed and wakes the peers. Their exchanges with this rank then fail.
  ~ShmFabric();
  ShmFabric(const ShmFabric&) = delete;
  ShmFabric& operator=(const ShmFabric&) = delete;

  int rank() const { return rank_; }
  int size() const { return segment_->shape().size; }
  bool spans() const { return segment_->shape().spans; }

  // Sets a function that a thread of this object calls when a peer's process has ended. Call it
  // before the first exchange.
  void on_death(std::function<void(int peer)> told);
  // Makes this rank's exchanges, including those in progress, throw `why`. Only the first call has
  // an effect.
  void end(const std::string& why);
  void throw_if_ended() const;

 private:
  friend class ShmExchange;
  friend class ShmMessages;
  friend class ShmSender;
  friend class ShmReceiver;

  static constexpr uint32_t kAll = ~0U;  // all threads
  static uint32_t waits_for(uint32_t tag) { return 1U << tag % 31; }

  // ---- messages to a peer
  // Returns a slot that now belongs to this thread, or -1 if none is free. The bell rings when a
  // slot becomes free.
  int acquire(int peer);
  void post(int peer, int slot, uint32_t tag);
  // ---- messages from a peer
  // Returns the slot of the oldest message with that tag, or -1 if there is none.
  int find(int peer, uint32_t tag) const;
  // Like find(), and marks the message as being read.
  int take(int peer, uint32_t tag);

  void release(int from, int to, int slot);
  // Returns the reason why messages to and from that peer fail, or "" if they work.
  std::string lost(int peer) const;
  void give_up(int peer);

  uint32_t bell() const { return segment_->bell(rank_).word.load(std::memory_order_seq_cst); }
  void ring(int rank, uint32_t threads);
  // Waits until the bell differs from `seen`: polls for a moment, then sleeps. Returns false at the
  // deadline.
  bool sleep(uint32_t seen, uint32_t threads, Clock::time_point deadline);

  // Copies `bytes` from a peer's memory.
  void copy_from(int peer, SpanCursor& from, SpanCursor& to, int64_t bytes) const;

  const std::shared_ptr<const ShmSegment> segment_;
  const int rank_;
  const std::vector<int64_t> pids_;
  std::vector<std::atomic<uint64_t>> sequences_;  // next sequence number of a message to each rank
  std::vector<std::atomic<bool>> gone_;           // by rank: whether its process has ended
  std::atomic<bool> ended_ = false;
  mutable std::mutex mutex_;
  std::string why_;                    // guarded by mutex_
  std::function<void(int)> on_death_;  // guarded by mutex_
  // The last member, because its thread uses the other members.
  std::optional<ProcessWatch> processes_;
};

}  // namespace penstock::comm
