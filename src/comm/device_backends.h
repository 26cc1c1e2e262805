#pragma once
// DeviceBackends: the collectives that a rank has on its device's memory, watched and ended
// together.
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/base/board.h"
#include "src/comm/device_collectives.h"

namespace penstock::comm {

// Owned by a group; from any thread, unless it says otherwise.
class DeviceBackends {
 public:
  std::shared_ptr<DeviceCollectives> add(c10::intrusive_ptr<c10d::Backend> back_end);
  // No more collectives begin. Those that are queued have a second to end, as their peers may be
  // there; then they are aborted.
  void abort(const std::string& why);
  // The first that abort() did cut off, as text; "" for none.
  std::string cut_off();
  // In order, where abort() was not called.
  void close();

  // Before look(): where it shows.
  void show_on(Board& board);
  // Shows what the device waits for, and calls `end` with what has taken longer than `limit`.
  // Returns when to be called again. Watchdog's thread only.
  std::chrono::milliseconds look(std::chrono::milliseconds limit,
                                 const std::function<void(const std::string& why)>& end);

 private:
  std::vector<std::shared_ptr<DeviceCollectives>> all();
  bool idle();
  void show(const DeviceCollectives::Pending* oldest);

  std::mutex mutex_;
  std::vector<std::shared_ptr<DeviceCollectives>> all_;  // guarded by mutex_, as below
  std::string refused_, cut_off_;
  Board* board_ = nullptr;
  int lane_ = -1;      // of the board
  std::string shown_;  // watch's thread only: the collective that the board shows
};

}  // namespace penstock::comm
