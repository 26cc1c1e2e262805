#include "tests/plans/exchange.h"

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::plans {

std::shared_ptr<const std::vector<Buffers>> Exchange::all(int rank, const std::vector<int>& group,
                                                          const std::string& text, Buffers mine) {
  std::string what = text;
  for (const auto& buffer : mine) what += concat(" ", buffer.size());
  std::unique_lock lock(mutex_);
  const std::pair key(group, num_calls_[{group, rank}]++);
  std::shared_ptr<Meeting>& slot = meetings_[key];
  if (!slot) {
    slot = std::make_shared<Meeting>();
    slot->text = what;
    slot->given = std::make_shared<std::vector<Buffers>>(group.size());
  }
  const std::shared_ptr<Meeting> meeting = slot;  // the last rank to arrive removes it from the map
  if (meeting->text != what)
    fail_locked(concat("rank ", rank, " is at '", what, "', others at '", meeting->text, "'"));
  if (!failure_.empty()) throw RuntimeFault(failure_);
  const auto position = std::find(group.begin(), group.end(), rank) - group.begin();
  (*meeting->given)[static_cast<size_t>(position)] = std::move(mine);
  if (++meeting->num_arrived == group.size()) {
    meetings_.erase(key);
    changed_.notify_all();
  } else {
    wait(lock, rank, what, [&] { return meeting->num_arrived == group.size(); });
  }
  return meeting->given;
}

void Exchange::post(int rank, int peer, const std::string& tag, std::vector<double> values) {
  std::unique_lock lock(mutex_);
  if (!failure_.empty()) throw RuntimeFault(failure_);
  std::deque<Message>& letters = letters_[{rank, peer}];
  letters.push_back({tag, std::move(values)});
  changed_.notify_all();
  // With kRendezvous a rank waits until its message is taken, so it has one message at a time.
  if (transport_ == Transport::kRendezvous)
    wait(lock, rank, concat("send ", tag), [&] { return letters.empty(); });
}

std::vector<double> Exchange::take(int rank, int peer, const std::string& tag) {
  std::unique_lock lock(mutex_);
  if (!failure_.empty()) throw RuntimeFault(failure_);
  std::deque<Message>& letters = letters_[{peer, rank}];
  const auto found = [&] {
    return std::find_if(letters.begin(), letters.end(),
                        [&](const Message& letter) { return letter.tag == tag; });
  };
  wait(lock, rank, concat("recv ", tag), [&] {
    return transport_ == Transport::kBuffered ? found() != letters.end() : !letters.empty();
  });
  const auto letter = found();
  if (letter == letters.end()) {
    fail_locked(
        concat("rank ", rank, " receives ", tag, ", rank ", peer, " sends ", letters.front().tag));
    throw RuntimeFault(failure_);
  }
  std::vector<double> values = std::move(letter->values);
  letters.erase(letter);
  changed_.notify_all();
  return values;
}

void Exchange::ended() {
  const std::scoped_lock lock(mutex_);
  ++num_ended_;
  look_for_deadlock();
}

void Exchange::wait(std::unique_lock<std::mutex>& lock, int rank, const std::string& where,
                    const std::function<bool()>& over) {
  if (over()) return;
  waits_[rank] = {concat("rank ", rank, " at '", where, "'"), over};
  look_for_deadlock();
  const bool in_time =
      changed_.wait_for(lock, timeout_, [&] { return over() || !failure_.empty(); });
  waits_.erase(rank);
  if (!in_time) fail_locked(concat("rank ", rank, " timed out waiting for peers at '", where, "'"));
  if (!over()) throw RuntimeFault(failure_);
}

void Exchange::look_for_deadlock() {
  if (waits_.empty() || static_cast<int>(waits_.size()) + num_ended_ != world_) return;
  std::vector<std::string> places;
  for (const auto& [rank, one] : waits_) {
    if (one.over()) return;
    places.push_back(one.where);
  }
  fail_locked(concat("every rank waits: ", join(places, ", ")));
}

void Exchange::abort(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  fail_locked(reason);
}

void Exchange::fail_locked(const std::string& reason) {
  if (failure_.empty()) failure_ = "[plans::exchange] " + reason;
  changed_.notify_all();
}

}  // namespace penstock::plans
