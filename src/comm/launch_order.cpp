#include "src/comm/launch_order.h"

namespace penstock::comm {

std::shared_ptr<LaunchTurn> LaunchOrder::next() {
  const std::lock_guard lock(open_->mutex);
  const int64_t number = open_->next++;
  open_->numbers.insert(number);
  return std::make_shared<LaunchTurn>(open_, number);
}

void LaunchTurn::wait() {
  std::unique_lock lock(open_->mutex);
  open_->changed.wait(
      lock, [this] { return open_->numbers.empty() || *open_->numbers.begin() >= number_; });
}

void LaunchTurn::leave() {
  const std::lock_guard lock(open_->mutex);
  if (open_->numbers.erase(number_) > 0) open_->changed.notify_all();
}

}  // namespace penstock::comm
