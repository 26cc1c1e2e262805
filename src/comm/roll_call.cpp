#include "src/comm/roll_call.h"

#include <exception>
#include <utility>
#include <vector>

#include "src/base/text.h"

namespace penstock::comm {

namespace {

constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
constexpr const char* kClose = "close";

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string get_text(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> value = store.get(key);
  return {value.begin(), value.end()};
}

}  // namespace

RollCall::RollCall(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                   int rank, int size, std::chrono::milliseconds grace)
    : store_(store->clone()),
      watch_store_(store->clone()),
      prefix_(prefix),
      rank_(rank),
      size_(size),
      grace_(grace) {
  watcher_ = std::thread([this] { watch(); });
}

RollCall::~RollCall() {
  try {
    // Those that miss this rank later still read how it ended.
    store_->set(key("here", rank_), bytes_of(here() + ", and has closed its engine"));
    store_->set(key("wake", rank_), bytes_of(kClose));
  } catch (const std::exception&) {
    // The store's host is gone, and with it the connection that the watch sleeps on: it ends too.
  }
  watcher_.join();
}

std::string RollCall::key(const char* what, int rank) const {
  return concat("penstock/", prefix_, "/", what, "/", rank);
}

void RollCall::set_position(Position position) {
  const std::lock_guard lock(mutex_);
  std::swap(position_, position);  // the old one is let go of after the lock
}

std::string RollCall::here() {
  const std::lock_guard lock(mutex_);
  return position_.text();
}

void RollCall::watch() {
  try {
    watch_store_->wait({key("wake", rank_)}, kForever);
    if (get_text(*watch_store_, key("wake", rank_)) == kClose) return;
    watch_store_->set(key("here", rank_), bytes_of(here()));
  } catch (const std::exception&) {
    // The rank that hosts the store ended; there is nobody left to answer.
  }
}

std::string RollCall::answer_of(int rank, std::chrono::milliseconds grace) {
  try {
    store_->wait({key("here", rank)}, grace);
    return get_text(*store_, key("here", rank));
  } catch (const std::exception&) {
    return "";
  }
}

std::string RollCall::collect(const std::string& error) {
  std::vector<std::string> failed, alive;
  const auto deadline = std::chrono::steady_clock::now() + grace_;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    const std::string at = answer_of(rank, std::max(left, std::chrono::milliseconds(50)));
    if (at.empty()) {
      failed.push_back(concat("rank ", rank, " is dead or stopped (no answer within ",
                              grace_.count() / 1000.0, " s)"));
    } else {
      alive.push_back(concat("rank ", rank, " is at ", at));
    }
  }
  if (failed.empty()) failed.push_back("every rank answers");
  failed.insert(failed.end(), alive.begin(), alive.end());
  return concat(join(failed, "; "), "; rank ", rank_, " failed at ", here(), ": ", error);
}

std::string RollCall::call(const std::string& error) {
  try {
    // The first rank to raise its hand holds the roll call; the others repeat its verdict.
    const bool first = store_->add(key("hand", 0), 1) == 1;
    store_->set(key("here", rank_), bytes_of(here()));
    if (!first) {
      store_->wait({key("verdict", 0)}, 2 * grace_);
      return get_text(*store_, key("verdict", 0));
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) store_->set(key("wake", rank), bytes_of("fault"));
    }
    const std::string verdict = collect(error);
    store_->set(key("verdict", 0), bytes_of(verdict));
    return verdict;
  } catch (const std::exception& fault) {
    return concat("the rendezvous store does not answer, so the rank that hosts it is dead (",
                  fault.what(), "); ", error);
  }
}

}  // namespace penstock::comm
