#include "src/comm/launch_order.h"

#include <map>

namespace penstock::comm {

namespace {

std::shared_ptr<OpenTurns> turns_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, std::weak_ptr<OpenTurns>> of_device;
  const std::lock_guard lock(mutex);
  std::weak_ptr<OpenTurns>& known = of_device[device];
  std::shared_ptr<OpenTurns> turns = known.lock();
  if (turns == nullptr) known = turns = std::make_shared<OpenTurns>();
  return turns;
}

}  // namespace

LaunchOrder::LaunchOrder(c10::Device device) : open_(turns_of(device.index())) {}

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
