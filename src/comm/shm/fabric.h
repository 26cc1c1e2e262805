#pragma once
// ShmFabric: the connections of one rank to the others of its host, through memory that they share
// ([Note: Shared memory], layout.h). Exchanges go over it (exchange.h).
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

// Owned by a group or a back end, which outlive every exchange over it. From any thread.
class ShmFabric {
 public:
  using Clock = std::chrono::steady_clock;

  // The segment is shared where ranks are threads of one process, which is what tests do. `pids`:
  // of each rank's process.
  ShmFabric(std::shared_ptr<const ShmSegment> segment, int rank, std::vector<int64_t> pids);
  // Tells the others, whose exchanges with this rank end.
  ~ShmFabric();
  ShmFabric(const ShmFabric&) = delete;
  ShmFabric& operator=(const ShmFabric&) = delete;

  int rank() const { return rank_; }
  int size() const { return segment_->shape().size; }
  bool spans() const { return segment_->shape().spans; }

  // Before the first exchange; called when a peer's process has ended, on a thread of its own.
  void on_death(std::function<void(int peer)> told);
  // Ends this rank's exchanges, those under way too: they throw `why`. The first one counts.
  void end(const std::string& why);
  void throw_if_ended() const;

 private:
  friend class ShmExchange;
  friend class ShmMessages;
  friend class ShmSender;
  friend class ShmReceiver;

  static constexpr uint32_t kAll = ~0U;  // threads
  static uint32_t waits_for(uint32_t tag) { return 1U << tag % 31; }

  // ---- of a message to a peer
  // A slot that is now this thread's; -1: none is free, and the bell rings when one is.
  int acquire(int peer);
  void post(int peer, int slot, uint32_t tag);
  // ---- of one from a peer
  // The slot of the first message with that tag; -1: it is not there.
  int find(int peer, uint32_t tag) const;
  // Takes it.
  int take(int peer, uint32_t tag);

  void release(int from, int to, int slot);
  // Why nothing more comes from that peer, or goes to it; "" while it may.
  std::string lost(int peer) const;
  void give_up(int peer);

  uint32_t bell() const { return segment_->bell(rank_).word.load(std::memory_order_seq_cst); }
  void ring(int rank, uint32_t threads);
  // Until the bell is no longer `seen` (after a moment's look) or the time has come, which is
  // false.
  bool sleep(uint32_t seen, uint32_t threads, Clock::time_point deadline);

  // `bytes` of a peer's memory.
  void copy_from(int peer, SpanCursor& from, SpanCursor& to, int64_t bytes) const;

  const std::shared_ptr<const ShmSegment> segment_;
  const int rank_;
  const std::vector<int64_t> pids_;
  std::vector<std::atomic<uint64_t>> sequences_;  // of messages to each rank
  std::vector<std::atomic<bool>> gone_;           // by rank: its process has ended
  std::atomic<bool> ended_ = false;
  mutable std::mutex mutex_;
  std::string why_;                        // guarded by mutex_
  std::function<void(int)> on_death_;      // guarded by mutex_
  std::optional<ProcessWatch> processes_;  // last: its thread uses the others
};

}  // namespace penstock::comm
