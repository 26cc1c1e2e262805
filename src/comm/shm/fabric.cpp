#include "src/comm/shm/fabric.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

#include "src/base/text.h"

namespace penstock::comm {

namespace {

// A thread polls the bell for this time before it sleeps. A sleep and a wake-up take about as long.
constexpr std::chrono::microseconds kSpin{20};

// FUTEX_PRIVATE_FLAG is not set: processes share the word.
int64_t futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* until,
              uint32_t threads) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, until, nullptr,
                 threads);
}

}  // namespace

ShmFabric::ShmFabric(std::shared_ptr<const ShmSegment> segment, int rank, std::vector<int64_t> pids)
    : segment_(std::move(segment)),
      rank_(rank),
      pids_(std::move(pids)),
      sequences_(pids_.size()),
      gone_(pids_.size()) {
  processes_.emplace(pids_, [this](int peer) {
    gone_[static_cast<size_t>(peer)] = true;
    ring(rank_, kAll);
    std::function<void(int)> told;
    {
      const std::lock_guard lock(mutex_);
      told = on_death_;
    }
    if (told) told(peer);
  });
}

ShmFabric::~ShmFabric() {
  processes_.reset();
  segment_->bell(rank_).left.store(1, std::memory_order_seq_cst);
  for (int peer = 0; peer < size(); ++peer) ring(peer, kAll);
}

void ShmFabric::on_death(std::function<void(int)> told) {
  const std::lock_guard lock(mutex_);
  on_death_ = std::move(told);
}

void ShmFabric::end(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) why_ = why;
    ended_ = true;
  }
  ring(rank_, kAll);
}

void ShmFabric::throw_if_ended() const {
  if (!ended_) return;
  const std::lock_guard lock(mutex_);
  throw std::runtime_error(why_);
}

int ShmFabric::acquire(int peer) {
  ShmLink& link = segment_->link(rank_, peer);
  const int num_slots = segment_->shape().num_slots();
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (int slot = 0; slot < num_slots; ++slot) {
      uint64_t head = link.heads[slot].load(std::memory_order_seq_cst);
      // Several threads of the sender may compete for the slot.
      if (state_of(head) == ShmState::kFree &&
          link.heads[slot].compare_exchange_strong(head, head_of(0, ShmState::kFilling))) {
        return slot;
      }
    }
    // a slot may have become free before this store, so the loop runs once more
    link.starved.store(1, std::memory_order_seq_cst);
  }
  return -1;
}

void ShmFabric::post(int peer, int slot, uint32_t tag) {
  ShmLink& link = segment_->link(rank_, peer);
  link.slots[slot].sequence = sequences_[static_cast<size_t>(peer)].fetch_add(1);
  link.heads[slot].store(head_of(tag, ShmState::kPosted), std::memory_order_release);
  ring(peer, waits_for(tag));
}

int ShmFabric::find(int peer, uint32_t tag) const {
  const ShmLink& link = segment_->link(peer, rank_);
  const uint64_t wanted = head_of(tag, ShmState::kPosted);
  int found = -1;
  for (int slot = 0; slot < segment_->shape().num_slots(); ++slot) {
    if (link.heads[slot].load(std::memory_order_acquire) != wanted) continue;
    if (found < 0 || link.slots[slot].sequence < link.slots[found].sequence) found = slot;
  }
  return found;
}

int ShmFabric::take(int peer, uint32_t tag) {
  const int found = find(peer, tag);
  if (found < 0) return -1;
  uint64_t head = head_of(tag, ShmState::kPosted);
  const bool taken = segment_->link(peer, rank_)
                         .heads[found]
                         .compare_exchange_strong(head, head_of(tag, ShmState::kTaking));
  return taken ? found : -1;
}

void ShmFabric::release(int from, int to, int slot) {
  ShmLink& link = segment_->link(from, to);
  link.heads[slot].store(head_of(0, ShmState::kFree), std::memory_order_seq_cst);
  if (link.starved.load(std::memory_order_seq_cst) != 0 && link.starved.exchange(0) != 0) {
    ring(from, kAll);
  }
}

std::string ShmFabric::lost(int peer) const {
  if (gone_[static_cast<size_t>(peer)]) {
    return concat("rank ", peer, " is gone: its process, ", pids_[static_cast<size_t>(peer)],
                  ", has ended");
  }
  if (segment_->bell(peer).left.load() != 0) {
    return concat("rank ", peer, " has closed its connections");
  }
  if (segment_->link(peer, rank_).broken.load() != 0) {
    return concat("rank ", peer, " has given up an exchange with rank ", rank_);
  }
  if (segment_->link(rank_, peer).broken.load() != 0) {
    return concat("rank ", rank_, " has given up an earlier exchange with rank ", peer);
  }
  return "";
}

void ShmFabric::give_up(int peer) {
  segment_->link(rank_, peer).broken.store(1);
  ring(peer, kAll);
  ring(rank_, kAll);  // wakes other threads of this rank
}

void ShmFabric::ring(int rank, uint32_t threads) {
  ShmBell& bell = segment_->bell(rank);
  // A sleeper increments `sleepers` before it reads the bell, and this function increments the bell
  // before it reads `sleepers` (both seq_cst), so no wake-up is lost.
  bell.word.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) == 0) return;
  futex(bell.word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, threads);
}

bool ShmFabric::sleep(uint32_t seen, uint32_t threads, Clock::time_point deadline) {
  ShmBell& bell = segment_->bell(rank_);
  const Clock::time_point begin = Clock::now();
  for (Clock::time_point now = begin; now - begin < kSpin; now = Clock::now()) {
    if (bell.word.load(std::memory_order_seq_cst) != seen) return true;
    if (now >= deadline) return false;
  }
  const auto since_start = deadline.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_start);
  const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(since_start - seconds);
  const timespec until{static_cast<time_t>(seconds.count()), static_cast<int64_t>(rest.count())};
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const bool timed_out =
      futex(bell.word, FUTEX_WAIT_BITSET, seen, &until, threads) != 0 && errno == ETIMEDOUT;
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return !timed_out;
}

void ShmFabric::copy_from(int peer, SpanCursor& from, SpanCursor& to, int64_t bytes) const {
  const int64_t pid = pids_[static_cast<size_t>(peer)];
  const bool own = pid == pids_[static_cast<size_t>(rank_)];
  while (bytes > 0) {
    if (own) {  // ranks that are threads of one process
      const std::span<char> source = from.next(bytes);
      const std::span<char> target = to.next(static_cast<int64_t>(source.size()));
      std::memcpy(target.data(), source.data(), target.size());
      from.pass(static_cast<int64_t>(target.size()));
      to.pass(static_cast<int64_t>(target.size()));
      bytes -= static_cast<int64_t>(target.size());
      continue;
    }
    std::array<iovec, SpanCursor::kBatch> remote{}, local{};
    const auto there = from.peek(remote, bytes);
    const auto here = to.peek(local, bytes);
    const ssize_t copied = process_vm_readv(static_cast<pid_t>(pid), here.data(), here.size(),
                                            there.data(), there.size(), 0);
    if (copied <= 0) {
      throw std::runtime_error(concat("rank ", peer, "'s memory cannot be read: ",
                                      copied == 0 ? "no bytes were copied" : std::strerror(errno)));
    }
    from.pass(copied);
    to.pass(copied);
    bytes -= copied;
  }
}

}  // namespace penstock::comm
