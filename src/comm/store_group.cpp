#include "src/comm/store_group.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "src/base/text.h"
#include "src/comm/device_backends.h"
#include "src/comm/timeouts.h"

namespace penstock::comm {

namespace {

// If a rank closes its engine before the others, the device has this time to finish collectives
// with it.
constexpr std::chrono::milliseconds kParting = std::chrono::seconds(2);
// Seconds after which a wait asks its first question, and the longest time between later questions.
constexpr double kAsk = 1.0, kAskOften = 5.0;
constexpr std::chrono::milliseconds kAskLook{500};

}  // namespace

StoreGroup::StoreGroup(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                       RankOf ranks, std::chrono::milliseconds timeout, const WatchOptions& watch)
    : rank_(ranks.rank), size_(ranks.size), limit_(timeout) {
  // The times of a failed exchange, the roll call and its repetition on other ranks add up to at
  // most `timeout`.
  const auto grace = std::clamp<std::chrono::milliseconds>(timeout / 8, std::chrono::seconds(1),
                                                           std::chrono::seconds(5));
  timeout_ = std::max(timeout - 2 * grace, timeout / 2);
  roll_call_.emplace(
      store, name, rank_, size_, grace,
      LostRanks::Requests{[this](const std::string& why) { end_exchanges(why); },
                          [this](const std::string& asked) { return answer(asked); }});
  watch_.emplace(rank_, size_, watch);
  if (size_ == 1) return;
  {
    const std::lock_guard lock(answers_);
    answers_questions_ = true;
  }
  watch_->look_at([this, board = &watch_->board()] { return ask(*board); });
}

// Keeps the error of the first failed exchange for the last call.
template <class Run>
auto StoreGroup::keeping_fault(const Run& run) {
  try {
    const std::string before = ended();
    if (!before.empty()) throw std::runtime_error(before);
    return run();
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    if (lost_.empty()) lost_ = reason(error);
    if (is_difference(ended_)) throw std::runtime_error(ended_);
    throw;
  }
}

void StoreGroup::exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                          uint32_t tag) {
  keeping_fault([&] { run(sends, receives, tag); });
}

bool StoreGroup::exchange_tiles(const std::vector<Piece>& sends, const TileSource& from,
                                uint32_t tag, const TakeTile& take) {
  return keeping_fault([&] { return run_tiles(sends, from, tag, take); });
}

std::string StoreGroup::last_call(const std::string& fault) {
  take_turn(board(), "close", "called close()");
  std::string why = fault;
  if (why.empty()) {
    const std::lock_guard lock(mutex_);
    why = lost_;
  }
  std::string first = "not every rank took part in close()";
  try {
    first = roll_call_->last_call(why, limit_);
  } catch (const std::exception&) {
    end_exchanges(first);
    throw;
  }
  if (!first.empty()) end_exchanges(first);
  return first;
}

void StoreGroup::end_exchanges(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_.empty()) ended_ = why;
    abort_waits();
  }
  back_ends().abort(why);
}

std::chrono::milliseconds StoreGroup::limit() {
  return met_.exchange(true) ? timeout_ : std::max(timeout_, kArrival);
}

std::string StoreGroup::ended() {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void StoreGroup::forget() {
  const std::lock_guard lock(mutex_);
  ended_.clear();
  lost_.clear();
}

void StoreGroup::let_go() {
  {
    const std::lock_guard lock(answers_);
    answers_questions_ = false;
  }
  watch_.reset();
  roll_call_.reset();
}

void StoreGroup::look_at_device() {
  back_ends().show_on(watch_->board());
  watch_->look_at([this, board = &watch_->board()] { return std::min(ask(*board), look()); });
}

// Runs on the thread that notices a neighbour's end.
void StoreGroup::neighbour_left(const std::string& error) {
  // A neighbour that closes its engine also ends, but has not failed. The last call distinguishes
  // the two cases.
  std::string why;
  const LostRanks::Ending ending = roll_call_->ending(&why);
  if (ending == LostRanks::Ending::kTogether) return;
  if (ending == LostRanks::Ending::kOneByOne) {  // its current collectives still finish
    const std::lock_guard lock(mutex_);
    left_ = why;
    return;
  }
  why = roll_call_->call(error);
  roll_call_->tell(why);
  end_exchanges(why);
}

// Runs on the watchdog's thread. For each long wait, asks the peer for which it waits. Returns the
// time until the next call.
std::chrono::milliseconds StoreGroup::ask(Board& board) {
  Standing mine = board.turns().standing(rank_);
  for (const RankStatus::Lane& lane : board.status().lanes) {
    double& asked = asked_[lane.name];
    const double age = lane.line.age_s;
    if (!lane.waits || age < asked) asked = 0.0;
    if (!lane.waits || lane.peer < 0 || age < asked + std::clamp(asked / 2, kAsk, kAskOften))
      continue;
    asked = age;
    mine.lane = lane.name;
    mine.sequence = lane.sequence;
    mine.tag = lane.tag;
    mine.collective = lane.line.text;
    roll_call_->ask(lane.peer, mine.text());
  }
  return kAskLook;
}

// Runs on the roll call's watch thread. A wait may end while this function examines it, so a
// difference counts only when it is found twice in a row.
std::string StoreGroup::answer(const std::string& question) {
  const std::lock_guard lock(answers_);
  if (!answers_questions_) return "";
  const Standing asks = Standing::parse(question);
  Board& board = watch_->board();
  const std::string why = difference(asks, board.turns().standing(rank_), board.status());
  const std::string found = concat(asks.sequence, " ", why);
  const bool again = std::exchange(suspected_[{asks.rank, asks.lane}], found) == found;
  return again ? why : "";
}

// Runs on the watchdog's thread.
std::chrono::milliseconds StoreGroup::look() {
  std::string left;
  {
    const std::lock_guard lock(mutex_);
    left = left_;
  }
  // After a neighbour has left, a device collective that takes a long time will never finish.
  return back_ends().look(left.empty() ? timeout_ : std::min(timeout_, kParting),
                          [&](const std::string& why) {
                            if (!left.empty()) roll_call_->tell(left);
                            end_exchanges(left.empty() ? why : left);
                          });
}

}  // namespace penstock::comm
