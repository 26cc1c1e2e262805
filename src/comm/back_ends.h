#pragma once
// BackEnds: the collectives that a rank has on its device's memory, watched and ended together.
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/base/board.h"
#include "src/comm/device_collectives.h"

namespace penstock::comm {

// Owned by a group; from any thread.
class BackEnds {
 public:
  std::shared_ptr<DeviceCollectives> add(c10::intrusive_ptr<c10d::Backend> back_end);
  void abort(const std::string& why);
  // Shows on the board what the device waits for, and calls `end` with what has taken longer than
  // `limit`. Returns when to be called again. Watch's thread only.
  std::chrono::milliseconds look(Board& board, std::chrono::milliseconds limit,
                                 const std::function<void(const std::string& why)>& end);
  // In order, where abort() was not called.
  void close();

 private:
  std::vector<std::shared_ptr<DeviceCollectives>> all();
  void show(Board& board, const DeviceCollectives::Pending* oldest);

  std::mutex mutex_;
  std::vector<std::shared_ptr<DeviceCollectives>> all_;  // guarded by mutex_
  std::string shown_;  // watch's thread only, as below: the collective that the board shows
  int lane_ = -1;      // of the board
};

}  // namespace penstock::comm
