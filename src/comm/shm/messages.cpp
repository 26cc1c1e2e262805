#include "src/comm/shm/messages.h"

#include <c10/util/thread_name.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "src/base/text.h"

namespace penstock::comm {

void ShmMessages::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void ShmMessages::add(const c10::intrusive_ptr<ShmWork>& work, const Message& message) {
  {
    const std::lock_guard lock(mutex_);
    added_.push_back({work, message, ShmFabric::Clock::now() + message.limit, nullptr});
    changed_.notify_all();
    if (!thread_.joinable()) {
      thread_ = std::thread([this] {
        c10::setThreadName("penstock-p2p");
        run();
      });
    }
  }
  fabric_.ring(fabric_.rank(), ShmFabric::kAll);  // wakes the thread, which may sleep on the bell
}

void ShmMessages::run() {
  std::deque<PendingMessage> entries;
  while (true) {
    // The bell is read before the attempt, so that a change after the attempt is not missed.
    const uint32_t seen = fabric_.bell();
    if (!wait_for_work(entries)) return;
    if (!advance(entries) && !entries.empty()) sleep(seen, entries);
  }
}

// Returns false if there is no work and no work can follow.
bool ShmMessages::wait_for_work(std::deque<PendingMessage>& entries) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closing_ || !added_.empty() || !entries.empty(); });
  std::move(added_.begin(), added_.end(), std::back_inserter(entries));
  added_.clear();
  return !entries.empty();
}

void ShmMessages::sleep(uint32_t seen, const std::deque<PendingMessage>& entries) {
  uint32_t threads = 0;
  auto deadline = ShmFabric::Clock::time_point::max();
  for (const PendingMessage& entry : entries) {
    threads |= ShmFabric::waits_for(entry.message.tag);
    deadline = std::min(deadline, entry.deadline);
  }
  fabric_.sleep(seen, threads, deadline);
}

// Returns whether a message moved or failed.
bool ShmMessages::advance(std::deque<PendingMessage>& entries) {
  bool moved = false;
  std::vector<PendingMessage*> waiting;  // messages that later ones must not overtake
  for (PendingMessage& entry : entries) {
    try {
      fabric_.throw_if_ended();
      const bool this_one = advance(entry, waiting);
      const auto now = ShmFabric::Clock::now();
      if (this_one) entry.deadline = now + entry.message.limit;
      moved = moved || this_one;
      if (entry.exchange && entry.exchange->done()) {
        entry.work->end(nullptr);
        entry.work.reset();
      } else if (now >= entry.deadline) {
        throw std::runtime_error(concat("a message ", entry.message.out ? "to" : "from", " rank ",
                                        entry.message.peer, " was not transferred within ",
                                        static_cast<double>(entry.message.limit.count()) / 1e3,
                                        " s"));
      }
    } catch (const std::exception&) {
      // Destroying the exchange gives up the connection before the waiting thread continues.
      const auto work = std::move(entry.work);
      entry.exchange.reset();
      work->end(std::current_exception());
      moved = true;
    }
  }
  std::erase_if(entries, [](const PendingMessage& entry) { return !entry.work; });
  return moved;
}

bool ShmMessages::advance(PendingMessage& entry, std::vector<PendingMessage*>& waiting) {
  const bool begun = entry.exchange && entry.exchange->posted();
  if (!begun) {
    // All sends to one peer are posted in their order, and so are all receives from one peer that
    // have the same tag.
    const Message& message = entry.message;
    const bool must_wait =
        std::any_of(waiting.begin(), waiting.end(), [&](const PendingMessage* before) {
          const Message& other = before->message;
          const bool same_peer = other.peer == message.peer || other.peer < 0 || message.peer < 0;
          return other.out == message.out && same_peer && (message.out || other.tag == message.tag);
        });
    if (must_wait || !connect(entry)) {
      waiting.push_back(&entry);
      return false;
    }
  }
  const bool moved = entry.exchange->advance();
  if (!entry.exchange->posted()) waiting.push_back(&entry);
  return moved;
}

// Returns false if `entry` is a receive from any rank and no rank has sent a matching message yet.
bool ShmMessages::connect(PendingMessage& entry) {
  if (entry.exchange) return true;
  Message& message = entry.message;
  if (message.peer < 0) {
    std::string lost;
    int num_lost = 0;
    for (int peer = 0; peer < fabric_.size() && message.peer < 0; ++peer) {
      if (peer == fabric_.rank()) continue;
      const std::string why = fabric_.lost(peer);  // before find()
      if (fabric_.find(peer, message.tag) >= 0) message.peer = peer;
      if (!why.empty()) lost = why;
      num_lost += why.empty() ? 0 : 1;
    }
    if (message.peer < 0 && num_lost == fabric_.size() - 1) throw std::runtime_error(lost);
    if (message.peer < 0) return false;
    entry.work->set_source(message.peer);
  }
  const Piece piece{message.peer, message.values.data_ptr(),
                    static_cast<int64_t>(message.values.nbytes())};
  const std::vector<Piece> one{piece}, none;
  entry.exchange = std::make_unique<ShmExchange>(fabric_, message.out ? one : none,
                                                 message.out ? none : one, message.tag);
  return true;
}

}  // namespace penstock::comm
