#include "src/exec/lane.h"

#include <c10/util/thread_name.h>

#include <utility>

#include "penstock/error.h"

namespace penstock::exec {

void Event::wait() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

void Event::settle() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done; });
}

void Event::set(const std::exception_ptr& error) const {
  const std::lock_guard lock(state_->mutex);
  state_->done = true;
  state_->error = error;
  state_->changed.notify_all();
}

Lane::Lane(const std::string& name) {
  thread_ = std::thread([this, name] {
    c10::setThreadName(name);
    run();
  });
}

Lane::~Lane() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

Event Lane::submit(std::function<void()> work) {
  Event event;
  event.state_ = std::make_shared<Event::State>();
  const std::lock_guard lock(mutex_);
  queue_.push_back({std::move(work), event});
  changed_.notify_all();
  return event;
}

void Lane::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (closing_) break;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (!error_) {
      try {
        task.work();
      } catch (...) {  // kept, and thrown again by every wait
        error_ = std::current_exception();
      }
    }
    task.work = nullptr;  // what it held is let go before anybody goes on
    task.event.set(error_);
    lock.lock();
  }
  const auto closed =
      std::make_exception_ptr(RuntimeFault("[exec::Lane::run] the engine was closed"));
  for (const Task& task : queue_) task.event.set(closed);
}

}  // namespace penstock::exec
