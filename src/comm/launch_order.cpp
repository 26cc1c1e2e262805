#include "src/comm/launch_order.h"

namespace penstock::comm {

std::shared_ptr<LaunchOrder::Turn> LaunchOrder::next() {
  const std::lock_guard lock(state_->mutex);
  const int64_t number = state_->next++;
  state_->open.insert(number);
  return std::shared_ptr<Turn>(new Turn(state_, number));
}

void LaunchOrder::Turn::wait() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return *state_->open.begin() == number_; });
}

void LaunchOrder::Turn::leave() {
  const std::lock_guard lock(state_->mutex);
  if (state_->open.erase(number_) > 0) state_->changed.notify_all();
}

}  // namespace penstock::comm
