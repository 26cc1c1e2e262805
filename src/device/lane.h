#pragma once
// Lane: one queue of work, in order. Between lanes, and between a lane and who gives it work, there
// are only fences.
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

// What a lane's work takes of the host. kThread: it computes, waits for peers or for a disk there,
// and has a thread for it. kQueued: it only queues work on the device, which submit() does at once.
enum class LaneKind : uint8_t { kThread, kQueued };

// The owner's thread calls submit(); after an error the lane runs nothing more and every later
// fence carries that first error. The destructor waits for the work in progress and drops the rest.
// Beside a device a lane has a stream, which is current while it works; its work comes after what
// the thread that submits it has queued by then.
class Lane {
 public:
  explicit Lane(const std::string& name) : Lane(name, Device::host(), LaneKind::kThread) {}
  // The device outlives it.
  Lane(const std::string& name, const Device& device, LaneKind kind);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Before the first work: what it does for a line of the plan is an event in the row of that name.
  void record(std::shared_ptr<trace::Recorder> recorder, const std::string& row);

  Fence submit(std::function<void()> work);

 private:
  struct Task {
    std::function<void()> work;
    Fence fence;
    std::optional<c10::Event> after;  // of the stream of who submitted it
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
  bool closing_ = false;      // guarded by mutex_
  std::exception_ptr error_;  // of who runs the work alone
  std::thread thread_;        // none: submit() runs it
};

}  // namespace penstock::device
