#pragma once
// Fence: the point at which a piece of a lane's work is done. Only fences set an order between
// lanes, and between a lane and the threads that submit work to it.
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "src/device/device.h"
#include "src/device/stream_event.h"
#include "src/trace/recorder.h"

namespace penstock::device {

// Set once, by a lane. Copies of a fence share one state, because either the lane or a waiting
// thread may end first. A default fence is already done.
//
// On a device, a lane's work may be queued and not yet done. The fence then has two halves: the
// host's half (the lane has queued the work) and the device's half (the work is done).
class Fence {
 public:
  // Makes this thread's later work wait for the fence: the thread blocks for the host's half, and
  // its stream waits for the device's half. Throws the error of the lane's work.
  void wait() const;
  // Like wait(), and also waits until data written to host memory has arrived.
  void wait_on_host() const;
  // Like wait_on_host(), but ignores errors of the work.
  void settle() const;

 private:
  friend class Lane;
  struct FenceState {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
    const Device* device = nullptr;
    std::shared_ptr<trace::Recorder> recorder;  // of the waiting thread; may be null
    trace::Text line;                           // the plan line of the work
    uint64_t flow = 0;
    int16_t row = 0;                    // the lane's row in the trace
    std::optional<StreamEvent> queued;  // does not change once `done` is true
  };
  void wait_for_host_half() const;
  void set(const std::exception_ptr& error) const;
  std::shared_ptr<FenceState> state_;
};

}  // namespace penstock::device
