#include "src/comm/lost_ranks.h"

#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "src/base/text.h"
#include "src/comm/timeouts.h"

namespace penstock::comm {

namespace {

constexpr const char* kClose = "close";
constexpr const char* kFault = "fault";
// Answers to the last call. Any other says why there is nothing to be done together.
constexpr const char* kAllWell = "all well";
constexpr const char* kSomeFailed = "some failed";

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string get_text(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> value = store.get(key);
  return {value.begin(), value.end()};
}

// Whether the key came in time. Throws where the store does not answer at all.
bool comes(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout) {
  try {
    store.wait({key}, timeout);
    return true;
  } catch (const std::exception&) {
    return store.check({key});
  }
}

}  // namespace

LostRanks::LostRanks(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                     int rank, int size, std::chrono::milliseconds grace,
                     std::function<void(const std::string&)> end_exchanges)
    : store_(store->clone()),
      watch_store_(store->clone()),
      prefix_(prefix),
      rank_(rank),
      size_(size),
      grace_(grace),
      end_exchanges_(std::move(end_exchanges)) {
  watcher_ = std::thread([this] { watch(); });
}

LostRanks::~LostRanks() {
  try {
    // Those that miss this rank later still read how it ended.
    store_->set(key("here", rank_), bytes_of(here() + ", and has closed its engine"));
    if (!called_last_) {
      decide(concat("rank ", rank_, " has closed its engine without gathering: it is at ", here()));
    }
    wake(rank_, kClose);
  } catch (const std::exception&) {
    // The store's host is gone, and with it the connection that the watch sleeps on: it ends too.
  }
  watcher_.join();
}

std::string LostRanks::key(const char* what, int rank) const {
  return concat("penstock/", prefix_, "/", what, "/", rank);
}

void LostRanks::set_position(Position position) {
  const std::lock_guard lock(mutex_);
  std::swap(position_, position);  // the old one is let go of after the lock
}

std::string LostRanks::here() {
  const std::lock_guard lock(mutex_);
  return position_.text();
}

void LostRanks::wake(int rank, const std::string& why) {
  const int64_t number = store_->add(key("wakes", rank), 1);
  store_->set(concat(key("wake", rank), "/", number), bytes_of(why));
}

void LostRanks::watch() {
  try {
    for (int64_t number = 1;; ++number) {
      const std::string next = concat(key("wake", rank_), "/", number);
      watch_store_->wait({next}, kForever);
      const std::string why = get_text(*watch_store_, next);
      if (why == kClose) return;
      watch_store_->set(key("here", rank_), bytes_of(here()));
      // May take a while, in which others ask where this rank is.
      if (why != kFault && end_exchanges_) end_exchanges_(why);
    }
  } catch (const std::exception&) {
    // The rank that hosts the store ended; there is nobody left to answer.
  }
}

std::string LostRanks::answer_of(int rank, std::chrono::milliseconds grace) {
  try {
    store_->wait({key("here", rank)}, grace);
    return get_text(*store_, key("here", rank));
  } catch (const std::exception&) {
    return "";
  }
}

std::string LostRanks::collect(const std::string& error) {
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
  const bool all_answer = failed.empty();
  if (all_answer) failed.push_back("every rank answers");
  failed.insert(failed.end(), alive.begin(), alive.end());
  std::string verdict =
      concat(join(failed, "; "), "; rank ", rank_, " failed at ", here(), ": ", error);
  if (!all_answer) decide(verdict);
  return verdict;
}

std::string LostRanks::call(const std::string& error) {
  try {
    // The first rank to raise its hand holds the roll call; the others repeat its verdict.
    const bool first = store_->add(key("hand", 0), 1) == 1;
    store_->set(key("here", rank_), bytes_of(here()));
    if (!first) {
      if (comes(*store_, key("verdict", 0), 2 * grace_)) {
        return get_text(*store_, key("verdict", 0));
      }
      return concat("the rank that asks all others has not ended within ",
                    2 * grace_.count() / 1000.0, " s; ", error);
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) wake(rank, kFault);
    }
    const std::string verdict = collect(error);
    store_->set(key("verdict", 0), bytes_of(verdict));
    return verdict;
  } catch (const std::exception& fault) {
    return concat("the rendezvous store does not answer, so the rank that hosts it is dead (",
                  fault.what(), "); ", error);
  }
}

void LostRanks::tell(const std::string& why) {
  try {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) wake(rank, why);
    }
  } catch (const std::exception&) {
    // The store's host is dead, as the others find too.
  }
}

LostRanks::Ending LostRanks::ending(std::string* why) {
  try {
    if (!store_->check({key("last call", 0)})) return Ending::kOpen;
    *why = get_text(*store_, key("last call", 0));
    return *why == kAllWell || *why == kSomeFailed ? Ending::kTogether : Ending::kOneByOne;
  } catch (const std::exception&) {
    return Ending::kOpen;  // call() says so
  }
}

// ---- the last call

void LostRanks::decide(const std::string& answer) {
  store_->compareSet(key("last call", 0), std::string(), answer);
}

bool LostRanks::decided(std::chrono::milliseconds within) {
  try {
    store_->wait({key("last call", 0)}, within);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

std::string LostRanks::last_call(const std::string& fault, std::chrono::milliseconds limit) {
  called_last_ = true;
  if (!fault.empty()) {
    store_->compareSet(key("fault", 0), std::string(), concat("rank ", rank_, ": ", fault));
  }
  // Counted after that: the last one knows of every fault.
  if (store_->add(key("came", 0), 1) == size_) {
    decide(store_->check({key("fault", 0)}) ? kSomeFailed : kAllWell);
  }
  if (!fault.empty() && !decided(kInFlight)) {
    tell(concat("rank ", rank_, " failed and is closing: ", fault));
  }
  if (!decided(limit)) {
    decide(call(
        concat("not every rank came to close its engine within ", limit.count() / 1000.0, " s")));
  }
  const std::string answer = get_text(*store_, key("last call", 0));
  if (answer == kAllWell) return "";
  if (answer == kSomeFailed) return get_text(*store_, key("fault", 0));
  throw std::runtime_error(answer);
}

}  // namespace penstock::comm
