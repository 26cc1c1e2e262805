#pragma once
// DeviceBackends: owns all DeviceCollectives of a rank. It watches all of them, and ends all of
// them together.
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/base/board.h"
#include "src/comm/device_collectives.h"

namespace penstock::comm {

// Owned by a group. Any thread may call a method, unless its comment says otherwise.
class DeviceBackends {
 public:
  std::shared_ptr<DeviceCollectives> add(c10::intrusive_ptr<c10d::Backend> back_end);
  // Refuses new collectives. Queued collectives get one second to finish, because peers may already
  // take part in them. Then the unfinished collectives are aborted.
  void abort(const std::string& why);
  // Returns the text of the first collective that abort() interrupted, or "" if there was none.
  std::string cut_off();
  // Shuts down all back ends, one after another. Skips back ends that abort() has ended.
  void close();

  // Sets the board that look() writes to. Call it before look().
  void show_on(Board& board);
  // Shows on the board which collective the device waits for. Calls `end` if a collective takes
  // longer than `limit`. Returns the time until the next call. Watchdog's thread only.
  std::chrono::milliseconds look(std::chrono::milliseconds limit,
                                 const std::function<void(const std::string& why)>& end);

 private:
  std::vector<std::shared_ptr<DeviceCollectives>> all();
  bool idle();
  void show(const DeviceCollectives::Pending* oldest);

  std::mutex mutex_;
  // Guarded by mutex_, like the members below.
  std::vector<std::shared_ptr<DeviceCollectives>> all_;
  std::string refused_, cut_off_;
  Board* board_ = nullptr;
  int lane_ = -1;      // index on the board
  std::string shown_;  // Watchdog's thread only: the collective that the board shows
};

}  // namespace penstock::comm
