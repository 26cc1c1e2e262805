#pragma once
// Lane: one queue of work that runs in order. Only fences set an order between lanes, and between a
// lane and its callers.
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "src/device/fence.h"

namespace penstock::device {

// How a lane's work runs on the host. kThread: in the lane's own thread, because the work computes,
// or waits for peers or a disk. kQueued: in submit(), because the work only queues operations on
// the device.
enum class LaneKind : uint8_t { kThread, kQueued };

// Only the owner's thread calls submit(). After an error the lane runs nothing more, and every
// later fence carries that first error. The destructor waits for the work in progress and drops
// queued work. On a device a lane has a stream, which is the current stream while the lane works.
// The lane's work runs after everything that the submitting thread queued before submit().
class Lane {
 public:
  explicit Lane(const std::string& name) : Lane(name, Device::host(), LaneKind::kThread) {}
  // The device must outlive the lane.
  Lane(const std::string& name, const Device& device, LaneKind kind);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Makes the lane record its work for each plan line as an event in row `row` of the trace. Must
  // be called before the first submit().
  void record(std::shared_ptr<trace::Recorder> recorder, const std::string& row);

  Fence submit(std::function<void()> work);
  // Waits for the work in progress, drops queued work and ends the thread, as the destructor does.
  // The fences of work submitted later carry an error.
  void close();

 private:
  struct Task {
    std::function<void()> work;
    Fence fence;
    std::optional<StreamEvent> after;  // end of the work that the submitting thread had queued
  };
  void run();
  void run(Task& task);

  const Device& device_;
  const std::optional<c10::Stream> stream_;
  std::shared_ptr<trace::Recorder> recorder_;
  int16_t row_ = trace::Recorder::kModel;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;    // guarded by mutex_
  bool closing_ = false;      // guarded by mutex_; the owner's thread sets it
  std::exception_ptr error_;  // used only by the thread that runs the work
  std::thread thread_;        // not started for kQueued
};

}  // namespace penstock::device
