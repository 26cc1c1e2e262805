#include "src/comm/back_ends.h"

#include <optional>
#include <utility>

#include "src/base/text.h"

namespace penstock::comm {

namespace {

constexpr std::chrono::milliseconds kLook{500};
constexpr std::chrono::seconds kShown{1};

}  // namespace

std::shared_ptr<DeviceCollectives> BackEnds::add(c10::intrusive_ptr<c10d::Backend> back_end) {
  auto made = std::make_shared<DeviceCollectives>(std::move(back_end));
  const std::lock_guard lock(mutex_);
  all_.push_back(made);
  return made;
}

std::vector<std::shared_ptr<DeviceCollectives>> BackEnds::all() {
  const std::lock_guard lock(mutex_);
  return all_;
}

void BackEnds::abort(const std::string& why) {
  for (const auto& one : all()) one->abort(why);
}

void BackEnds::show(Board& board, const DeviceCollectives::Pending* oldest) {
  const std::string text = oldest == nullptr ? "" : oldest->position.text();
  if (text == shown_) return;
  shown_ = text;
  if (lane_ < 0) lane_ = board.lane("device");
  board.wait_ends(lane_);
  if (oldest == nullptr) return;
  const Position& at = oldest->position;
  board.wait_begins(lane_, {at.step, at.sequence, 0}, *at.what);
}

std::chrono::milliseconds BackEnds::look(Board& board, std::chrono::milliseconds limit,
                                         const std::function<void(const std::string&)>& end) {
  const std::vector<std::shared_ptr<DeviceCollectives>> back_ends = all();
  std::optional<DeviceCollectives::Pending> oldest;
  for (const auto& one : back_ends) {
    const auto pending = one->oldest();
    if (pending && (!oldest || pending->since < oldest->since)) oldest = pending;
  }
  const auto age = oldest ? std::chrono::steady_clock::now() - oldest->since : kLook - kLook;
  show(board, oldest && age > kShown ? &*oldest : nullptr);
  if (oldest && age > limit) {
    end(concat("the device has not ended ", oldest->position.text(), " within ",
               static_cast<double>(limit.count()) / 1e3, " s"));
  }
  return kLook;
}

void BackEnds::close() {
  for (const auto& one : all()) one->shut_down();
  const std::lock_guard lock(mutex_);
  all_.clear();
}

}  // namespace penstock::comm
