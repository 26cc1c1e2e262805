#pragma once
// Fence: when work that a lane was given is done. The only order between lanes, and between them
// and the threads that gave it.
#include <c10/core/Event.h>

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "src/device/device.h"
#include "src/trace/recorder.h"

namespace penstock::device {

// Set once, by a lane; copies share it (a lane and the waiting threads outlive each other in any
// order, hence the shared state). A default fence is done already.
//
// Where a device computes, a lane's work may be queued there and not done: then a fence has two
// halves, the host's (the lane has queued it) and the device's.
class Fence {
 public:
  // What this thread queues or does from now on comes after it: the host waits for the host's half,
  // and this thread's stream for the device's. Throws the error the work ended with.
  void wait() const;
  // As wait(), and what it wrote to host memory is there.
  void wait_on_host() const;
  // As wait_on_host(), whatever the work ended with.
  void settle() const;

 private:
  friend class Lane;
  struct FenceState {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
    const Device* device = nullptr;
    std::shared_ptr<trace::Recorder> recorder;  // of who waits; may be null
    trace::Text line;                           // what is waited for
    uint64_t flow = 0;
    int16_t row = 0;                   // whose work it is
    std::optional<c10::Event> queued;  // not changed any more once `done`
  };
  void wait_for_host_half() const;
  void set(const std::exception_ptr& error) const;
  std::shared_ptr<FenceState> state_;
};

}  // namespace penstock::device
