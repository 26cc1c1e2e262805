#include "src/comm/device_backends.h"

#include <algorithm>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "src/base/text.h"
#include "src/comm/timeouts.h"

namespace penstock::comm {

namespace {

// kLook is the time between two calls of look(), and kPoll the time between two checks in abort().
// A collective is shown when its age is above kShown.
constexpr std::chrono::milliseconds kLook{500};
constexpr std::chrono::seconds kShown{1};
constexpr std::chrono::milliseconds kPoll{5};

}  // namespace

std::shared_ptr<DeviceCollectives> DeviceBackends::add(c10::intrusive_ptr<c10d::Backend> back_end) {
  auto made = std::make_shared<DeviceCollectives>(std::move(back_end));
  const std::lock_guard lock(mutex_);
  all_.push_back(made);
  if (!refused_.empty()) made->refuse(refused_);
  return made;
}

std::vector<std::shared_ptr<DeviceCollectives>> DeviceBackends::all() {
  const std::lock_guard lock(mutex_);
  return all_;
}

bool DeviceBackends::idle() {
  const auto back_ends = all();
  return std::none_of(back_ends.begin(), back_ends.end(),
                      [](const auto& one) { return one->oldest().has_value(); });
}

void DeviceBackends::abort(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (refused_.empty()) refused_ = why;
    for (const auto& one : all_) one->refuse(refused_);
  }
  // New collectives are now refused, but queued ones may still finish.
  const auto deadline = std::chrono::steady_clock::now() + kInFlight;
  while (!idle() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
  }
  // All at once: to abort one communicator may wait for the whole device, on which kernels of the
  // others run until they are aborted, too.
  std::vector<std::future<std::optional<Position>>> aborted;
  for (const auto& one : all()) {
    aborted.push_back(std::async(std::launch::async, [one] { return one->abort(); }));
  }
  for (auto& one : aborted) {
    const std::optional<Position> cut_off = one.get();
    const std::lock_guard lock(mutex_);
    if (cut_off && cut_off_.empty()) cut_off_ = cut_off->text();
  }
}

std::string DeviceBackends::cut_off() {
  const std::lock_guard lock(mutex_);
  return cut_off_;
}

void DeviceBackends::close() {
  for (const auto& one : all()) one->shut_down();
  const std::lock_guard lock(mutex_);
  all_.clear();
}

void DeviceBackends::show_on(Board& board) {
  board_ = &board;
  lane_ = board.lane("device");
}

void DeviceBackends::show(const DeviceCollectives::Pending* oldest) {
  const std::string text = oldest == nullptr ? "" : oldest->position.text();
  if (text == shown_) return;
  shown_ = text;
  board_->wait_ends(lane_);
  if (oldest == nullptr) return;
  const Position& at = oldest->position;
  board_->wait_begins(lane_, {at.step, at.sequence, 0}, *at.what);
}

std::chrono::milliseconds DeviceBackends::look(std::chrono::milliseconds limit,
                                               const std::function<void(const std::string&)>& end) {
  std::optional<DeviceCollectives::Pending> oldest;
  for (const auto& one : all()) {
    const auto pending = one->oldest();
    if (pending && (!oldest || pending->since < oldest->since)) oldest = pending;
  }
  // Short waits are normal on a device, so a collective is shown only after kShown.
  const auto age = oldest ? std::chrono::steady_clock::now() - oldest->since : kLook - kLook;
  show(oldest && age > kShown ? &*oldest : nullptr);
  if (oldest && age > limit) {
    end(concat("the device has not finished ", oldest->position.text(), " within ",
               static_cast<double>(limit.count()) / 1e3, " s"));
  }
  return kLook;
}

}  // namespace penstock::comm
