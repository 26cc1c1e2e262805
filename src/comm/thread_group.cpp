// Group whose ranks are threads of one process: a mailbox under one lock. For tests and for native
// programs; a failed or closed rank ends the waits of the others.
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "penstock/group.h"
#include "src/base/text.h"
#include "src/comm/watch.h"

namespace penstock {
namespace {

// Shared by the ranks of one group, hence the shared_ptr. Everything is guarded by `mutex`.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, uint32_t>, std::vector<std::vector<char>>>
      letters;  // from, to, tag
  std::vector<Position> positions;
  std::vector<bool> closed;
  std::string verdict;
};

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
    std::unique_lock lock(mailbox_->mutex);
    for (const Piece& piece : sends) {
      const char* data = static_cast<const char*>(piece.data);
      mailbox_->letters[{rank_, piece.peer, tag}].emplace_back(data, data + piece.bytes);
    }
    mailbox_->changed.notify_all();
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    for (const Piece& piece : receives) receive(lock, piece, tag, deadline);
  }

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

  void close() override {
    watch_.reset();
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->closed[rank_] = true;
    mailbox_->changed.notify_all();
  }

 private:
  void receive(std::unique_lock<std::mutex>& lock, const Piece& piece, uint32_t tag,
               std::chrono::steady_clock::time_point deadline) {
    const std::tuple<int, int, uint32_t> key{piece.peer, rank_, tag};
    if (watch_) watch_->board().waits_for(tag, piece.peer);
    auto& letters = mailbox_->letters;
    const auto ready = [&] {
      return letters.contains(key) || mailbox_->closed[piece.peer] || !mailbox_->verdict.empty();
    };
    const bool in_time = mailbox_->changed.wait_until(lock, deadline, ready);
    const auto found = letters.find(key);
    if (found == letters.end()) {
      throw std::runtime_error(
          concat(in_time ? "peer is gone: rank " : "timed out on rank ", piece.peer));
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
  std::optional<comm::Watch> watch_;
};

}  // namespace

std::vector<std::shared_ptr<Group>> Group::threads(int size, std::chrono::milliseconds timeout,
                                                   const WatchOptions& watch) {
  auto mailbox = std::make_shared<Mailbox>();
  mailbox->positions.assign(size, Position::of("before step 1"));
  mailbox->closed.assign(size, false);
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.push_back(std::make_shared<ThreadGroup>(mailbox, rank, size, timeout, watch));
  }
  return groups;
}

std::shared_ptr<Group> Group::alone() { return threads(1).front(); }

}  // namespace penstock
