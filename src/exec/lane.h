#pragma once
// Lane: one thread with one queue. Event: what other threads wait for; the only order between
// lanes.
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace penstock::exec {

// Set once, by a lane; copies share it (a lane and the waiting threads outlive each other in any
// order, hence the shared state). A default event is done already.
class Event {
 public:
  // Blocks until done; throws the error the work ended with.
  void wait() const;
  // As wait(), whatever the work ended with.
  void settle() const;

 private:
  friend class Lane;
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  void set(const std::exception_ptr& error) const;
  std::shared_ptr<State> state_;
};

// The owner's thread calls submit(); after an error the lane runs nothing more and every later
// event carries that first error. The destructor waits for the work in progress and drops the rest.
class Lane {
 public:
  explicit Lane(const std::string& name);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  Event submit(std::function<void()> work);

 private:
  struct Task {
    std::function<void()> work;
    Event event;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;    // guarded by mutex_
  bool closing_ = false;      // guarded by mutex_
  std::exception_ptr error_;  // lane thread only
  std::thread thread_;
};

}  // namespace penstock::exec
