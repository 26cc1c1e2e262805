// Group whose ranks are threads of one process, used by tests and native programs. The ranks share
// a mailbox with one lock. A rank that fails or closes ends the waits of the other ranks.
#include <ATen/ops/ones.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "penstock/error.h"
#include "penstock/group.h"
#include "src/base/text.h"
#include "src/comm/timeouts.h"
#include "src/comm/watchdog.h"

namespace penstock {
namespace {

// The ranks of one group share one mailbox through a shared_ptr. `mutex` guards all members.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, uint32_t>, std::vector<std::vector<char>>>
      letters;  // from, to, tag
  std::vector<Position> positions;
  std::vector<bool> closed;
  std::vector<std::string> ended;  // by rank: why its exchanges have ended, or "" if they have not
  std::string verdict;
  // For the last call: the number of ranks that made it, the fault of the first failed rank, and
  // the reason why the call was refused.
  int came = 0;
  std::string fault, refusal;
  std::shared_ptr<Mailbox> next;  // the mailbox after renew()
};

std::shared_ptr<Mailbox> make_mailbox(int size) {
  auto mailbox = std::make_shared<Mailbox>();
  mailbox->positions.assign(size, Position::of("before step 1"));
  mailbox->closed.assign(size, false);
  mailbox->ended.assign(size, "");
  return mailbox;
}

class ThreadGroup final : public Group {
 public:
  ThreadGroup(std::shared_ptr<Mailbox> mailbox, int rank, int size,
              std::chrono::milliseconds timeout, const WatchOptions& watch)
      : mailbox_(std::move(mailbox)), rank_(rank), size_(size), timeout_(timeout) {
    watch_.emplace(rank, size, watch);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag) override {
    // A send copies its bytes, so it never waits for its receiver.
    std::unique_lock lock(mailbox_->mutex);
    for (const Piece& piece : sends) {
      const char* data = static_cast<const char*>(piece.data);
      mailbox_->letters[{rank_, piece.peer, tag}].emplace_back(data, data + piece.bytes);
    }
    mailbox_->changed.notify_all();
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    for (const Piece& piece : receives) receive(lock, piece, tag, deadline);
  }

  std::string transport() const override { return "threads"; }

  void set_position(Position position) override {
    const std::lock_guard lock(mailbox_->mutex);
    std::swap(mailbox_->positions[rank_], position);
  }

  std::string roll_call(const std::string& error) override {
    const std::lock_guard lock(mailbox_->mutex);
    if (mailbox_->verdict.empty()) {
      std::vector<std::string> lines;
      for (int rank = 0; rank < size_; ++rank) {
        lines.push_back(concat("rank ", rank, mailbox_->closed[rank] ? " left at " : " is at ",
                               mailbox_->positions[rank].text()));
      }
      mailbox_->verdict = concat(join(lines, "; "), "; rank ", rank_, " failed: ", error);
    }
    mailbox_->changed.notify_all();
    return mailbox_->verdict;
  }

  Board* board() override { return watch_ ? &watch_->board() : nullptr; }
  std::string last_call(const std::string& fault) override {
    std::unique_lock lock(mailbox_->mutex);
    Mailbox& box = *mailbox_;
    const std::string mine = fault.empty() ? box.verdict : concat("rank ", rank_, ": ", fault);
    if (box.fault.empty()) box.fault = mine;
    ++box.came;
    box.changed.notify_all();
    const auto decided = [&] { return box.came == size_ || !box.refusal.empty(); };
    // A failed rank first waits until messages in flight have arrived ([Note: Last call]).
    if (!mine.empty() && !box.changed.wait_for(lock, comm::kInFlight, decided)) {
      for (std::string& ended : box.ended) {
        if (ended.empty()) ended = concat("rank ", rank_, " failed and is closing: ", mine);
      }
      box.changed.notify_all();
    }
    if (!box.changed.wait_for(lock, timeout_, decided)) {
      box.refusal = "not every rank has begun to close its engine within the timeout";
    }
    if (!box.refusal.empty() || !box.fault.empty()) {
      box.ended[rank_] = "the last call";
      box.changed.notify_all();
    }
    if (!box.refusal.empty()) throw std::runtime_error(box.refusal);
    return box.fault;
  }

  void end_exchanges(const std::string& why) override {
    const std::lock_guard lock(mailbox_->mutex);
    if (mailbox_->ended[rank_].empty()) mailbox_->ended[rank_] = why;
    mailbox_->changed.notify_all();
  }

  void renew() override {
    const std::shared_ptr<Mailbox> old = mailbox_;
    const std::lock_guard lock(old->mutex);
    // The first rank that calls makes the new mailbox for all ranks.
    if (!old->next) old->next = make_mailbox(size_);
    mailbox_ = old->next;
  }

  void close() override {
    watch_.reset();
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->closed[rank_] = true;
    if (mailbox_->came < size_ && mailbox_->refusal.empty()) {
      mailbox_->refusal = concat("rank ", rank_, " has closed its engine without gathering ",
                                 "parameters, at ", mailbox_->positions[rank_].text());
    }
    mailbox_->changed.notify_all();
  }

 protected:
  void watch_peers() override {
    throw ConfigError(
        "[comm::Group] ranks that are threads can exchange only through host memory. Use one "
        "process per rank for collectives on a device");
  }

 private:
  void receive(std::unique_lock<std::mutex>& lock, const Piece& piece, uint32_t tag,
               std::chrono::steady_clock::time_point deadline) {
    const std::tuple<int, int, uint32_t> key{piece.peer, rank_, tag};
    if (watch_) watch_->board().waits_for(tag, piece.peer);
    auto& letters = mailbox_->letters;
    const std::string& ended = mailbox_->ended[rank_];
    const auto ready = [&] {
      return letters.contains(key) || mailbox_->closed[piece.peer] || !mailbox_->verdict.empty() ||
             !ended.empty();
    };
    const bool in_time = mailbox_->changed.wait_until(lock, deadline, ready);
    // A letter is delivered even if its sender has failed or closed in the meantime.
    const auto found = letters.find(key);
    if (found == letters.end()) {
      if (!ended.empty()) throw std::runtime_error(ended);
      throw std::runtime_error(
          concat(in_time ? "peer is gone: rank " : "timed out waiting for rank ", piece.peer));
    }
    auto& letter = found->second.front();
    if (static_cast<int64_t>(letter.size()) != piece.bytes) {
      throw std::runtime_error(concat("rank ", piece.peer, " sent ", letter.size(), " bytes where ",
                                      piece.bytes, " were expected"));
    }
    if (!letter.empty()) std::memcpy(piece.data, letter.data(), letter.size());
    found->second.erase(found->second.begin());
    if (found->second.empty()) letters.erase(found);
  }

  std::shared_ptr<Mailbox> mailbox_;
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  std::optional<comm::Watchdog> watch_;
};

// MKL's vector functions (torch::tanh and others on CPU) set themselves up in their first call. If
// several threads make it at the same time, results may be wrong by 5e-5 in about one process of
// a thousand (torch 2.13 without Penstock: 9 of 13,500; none after a first call by one thread).
void set_up_vector_functions() {
  static std::once_flag once;
  std::call_once(once, [] { at::ones({64}).exp_(); });
}

}  // namespace

std::vector<std::shared_ptr<Group>> Group::threads(int size, std::chrono::milliseconds timeout,
                                                   const WatchOptions& watch) {
  set_up_vector_functions();
  const auto mailbox = make_mailbox(size);
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.push_back(std::make_shared<ThreadGroup>(mailbox, rank, size, timeout, watch));
  }
  return groups;
}

std::shared_ptr<Group> Group::alone() { return threads(1).front(); }

}  // namespace penstock
