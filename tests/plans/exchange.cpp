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
  const std::shared_ptr<Meeting> meeting = slot;  // the last to arrive takes it out of the map
  if (meeting->text != what)
    fail_locked(concat("rank ", rank, " is at '", what, "', others at '", meeting->text, "'"));
  if (!failure_.empty()) throw RuntimeFault(failure_);
  const auto position = std::find(group.begin(), group.end(), rank) - group.begin();
  (*meeting->given)[static_cast<size_t>(position)] = std::move(mine);
  if (++meeting->num_arrived == group.size()) {
    meetings_.erase(key);
    meeting->complete.notify_all();
  } else {
    const bool in_time = meeting->complete.wait_for(
        lock, timeout_, [&] { return meeting->num_arrived == group.size() || !failure_.empty(); });
    if (!in_time) fail_locked(concat("rank ", rank, " waited in vain for peers at '", what, "'"));
    if (meeting->num_arrived < group.size()) throw RuntimeFault(failure_);
  }
  return meeting->given;
}

void Exchange::abort(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  fail_locked(reason);
}

void Exchange::fail_locked(const std::string& reason) {
  if (failure_.empty()) failure_ = "[plans::exchange] " + reason;
  for (const auto& [key, meeting] : meetings_) meeting->complete.notify_all();
}

}  // namespace penstock::plans
