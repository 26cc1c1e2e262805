#include "src/comm/lost_ranks.h"

#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "src/base/text.h"
#include "src/base/turns.h"
#include "src/comm/timeouts.h"

namespace penstock::comm {

namespace {

constexpr const char* kClose = "close";
constexpr const char* kFault = "fault";
constexpr const char* kQuestion = "question ";  // prefix of a question
// Answers to the last call. Any other answer is the reason why the ranks cannot close together.
constexpr const char* kAllWell = "all well";
constexpr const char* kSomeFailed = "some failed";

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// Returns whether a rank at this position gathers parameters, in the order of its forward.
bool gathers(const std::string& position) {
  return position.find(" param all_gather") != std::string::npos;
}

std::string get_text(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> value = store.get(key);
  return {value.begin(), value.end()};
}

// Returns whether the key appeared within `timeout`. Throws if the store does not answer.
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
                     int rank, int size, std::chrono::milliseconds grace, Requests requests)
    : store_(store->clone()),
      watch_store_(store->clone()),
      prefix_(prefix),
      rank_(rank),
      size_(size),
      grace_(grace),
      requests_(std::move(requests)) {
  watcher_ = std::thread([this] { watch(); });
}

LostRanks::~LostRanks() {
  try {
    // If a rank notices later that this rank is gone, it can still read how this rank ended.
    store_->set(key("here", rank_), bytes_of(here() + ", and has closed its engine"));
    if (!called_last_) {
      decide(concat("rank ", rank_, " has closed its engine without gathering parameters, at ",
                    here()));
    }
    wake(*store_, rank_, kClose);
  } catch (const std::exception&) {
    // The store's host is gone. The watch thread's connection to the store also fails, which ends
    // that thread.
  }
  watcher_.join();
}

std::string LostRanks::key(const char* what, int rank) const {
  return concat("penstock/", prefix_, "/", what, "/", rank);
}

void LostRanks::set_position(Position position) {
  const std::lock_guard lock(mutex_);
  std::swap(position_, position);  // the old position is destroyed after the lock
}

std::string LostRanks::here() {
  const std::lock_guard lock(mutex_);
  return position_.text();
}

void LostRanks::wake(c10d::Store& store, int rank, const std::string& why) {
  // Wake-ups are numbered, so that no wake-up is lost or seen twice.
  const int64_t number = store.add(key("wakes", rank), 1);
  store.set(concat(key("wake", rank), "/", number), bytes_of(why));
}

void LostRanks::watch() {
  try {
    for (int64_t number = 1;; ++number) {
      const std::string next = concat(key("wake", rank_), "/", number);
      watch_store_->wait({next}, kForever);
      const std::string why = get_text(*watch_store_, next);
      if (why == kClose) return;
      if (why.starts_with(kQuestion)) watch_store_->deleteKey(next);  // ranks may ask often
      hear(why);
    }
  } catch (const std::exception&) {
    // The rank that hosts the store has ended, so no rank can make another request.
  }
}

// Runs on the watch thread.
void LostRanks::hear(const std::string& why) {
  if (!why.starts_with(kQuestion)) {
    // The answer is stored first: a roll call may be waiting for it, and ending the exchanges may
    // take a while.
    watch_store_->set(key("here", rank_), bytes_of(here()));
    if (why != kFault && requests_.end_exchanges) requests_.end_exchanges(why);
    return;
  }
  if (!requests_.answer) return;
  const std::string found = requests_.answer(why.substr(std::string(kQuestion).size()));
  if (found.empty()) return;
  // Several ranks may find a difference. All ranks raise the first one.
  const std::vector<uint8_t> first =
      watch_store_->compareSet(key("difference", 0), bytes_of(""), bytes_of(found));
  const std::string difference(first.begin(), first.end());
  tell(*watch_store_, difference);
  requests_.end_exchanges(difference);
}

void LostRanks::ask(int rank, const std::string& question) {
  try {
    // A wait of another thread may hold the connection `store_` for a long time.
    if (!asking_) asking_ = store_->clone();
    wake(*asking_, rank, kQuestion + question);
  } catch (const std::exception&) {
    // The store's host is dead. Any wait for that rank ends on its own.
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
  bool elsewhere = false;  // another rank gathers other parameters
  const auto deadline = std::chrono::steady_clock::now() + grace_;
  for (int rank = 0; rank < size_; ++rank) {
    // All answers share one grace period, of which each rank gets at least 50 ms.
    if (rank == rank_) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    const std::string at = answer_of(rank, std::max(left, std::chrono::milliseconds(50)));
    if (at.empty()) {
      failed.push_back(concat("rank ", rank, " is dead or stopped (no answer within ",
                              grace_.count() / 1000.0, " s)"));
    } else {
      elsewhere |= gathers(here()) && gathers(at) && at != here();
      alive.push_back(concat("rank ", rank, " is at ", at));
    }
  }
  // If all ranks answer, the fault is an error or a divergence on this rank, and the ranks can
  // still close together. If a rank is dead, they cannot, and the verdict becomes the answer to the
  // last call.
  const bool all_answer = failed.empty();
  if (all_answer) failed.push_back("every rank answers");
  failed.insert(failed.end(), alive.begin(), alive.end());
  std::string verdict =
      concat(join(failed, "; "), "; rank ", rank_, " failed at ", here(), ": ", error);
  if (all_answer && elsewhere) {
    verdict +=
        concat(". These ranks may run units in different orders or different numbers of times. ",
               kUnequalUnits);
  }
  if (!all_answer) decide(verdict);
  return verdict;
}

std::string LostRanks::call(const std::string& error) {
  try {
    if (store_->check({key("difference", 0)})) return get_text(*store_, key("difference", 0));
    // The first rank that increments this key holds the roll call. The others repeat its verdict.
    const bool first = store_->add(key("hand", 0), 1) == 1;
    store_->set(key("here", rank_), bytes_of(here()));
    if (!first) {
      if (comes(*store_, key("verdict", 0), 2 * grace_)) {
        return get_text(*store_, key("verdict", 0));
      }
      return concat("the rank that asks all ranks for their positions has not finished within ",
                    2 * grace_.count() / 1000.0, " s; ", error);
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) wake(*store_, rank, kFault);
    }
    const std::string verdict = collect(error);
    store_->set(key("verdict", 0), bytes_of(verdict));
    return verdict;
  } catch (const std::exception& fault) {
    return concat("the rendezvous store does not answer, so the rank that hosts it is dead (",
                  fault.what(), "); ", error);
  }
}

void LostRanks::tell(const std::string& why) { tell(*store_, why); }

void LostRanks::tell(c10d::Store& store, const std::string& why) {
  try {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) wake(store, rank, why);
    }
  } catch (const std::exception&) {
    // The store's host is dead. The other ranks also notice that.
  }
}

LostRanks::Ending LostRanks::ending(std::string* why) {
  try {
    if (!store_->check({key("last call", 0)})) return Ending::kOpen;
    *why = get_text(*store_, key("last call", 0));
    return *why == kAllWell || *why == kSomeFailed ? Ending::kTogether : Ending::kOneByOne;
  } catch (const std::exception&) {
    return Ending::kOpen;  // call() reports that the store is gone
  }
}

// ---- the last call ([Note: Last call], penstock/group.h)

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
  // The fault is stored before this rank is counted, so the last rank to be counted sees every
  // fault.
  if (store_->add(key("came", 0), 1) == size_) {
    decide(store_->check({key("fault", 0)}) ? kSomeFailed : kAllWell);
  }
  // A failed rank first waits until messages in flight have arrived. Then it ends the exchanges of
  // ranks that may be waiting for it.
  if (!fault.empty() && !decided(kInFlight)) {
    tell(concat("rank ", rank_, " failed and is closing: ", fault));
  }
  if (!decided(limit)) {
    decide(call(concat("not every rank has begun to close its engine within ",
                       limit.count() / 1000.0, " s")));
  }
  const std::string answer = get_text(*store_, key("last call", 0));
  if (answer == kAllWell) return "";
  if (answer == kSomeFailed) return get_text(*store_, key("fault", 0));
  throw std::runtime_error(answer);
}

}  // namespace penstock::comm
