#include "src/device/lane.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/thread_name.h>

#include <utility>

#include "penstock/error.h"

namespace penstock::device {

namespace {

std::exception_ptr closed_error() {
  return std::make_exception_ptr(RuntimeFault("[device::Lane::run] the engine was closed"));
}

}  // namespace

Lane::Lane(const std::string& name, const Device& device, LaneKind kind)
    : device_(device),
      stream_(device.is_host() ? std::nullopt : std::optional(device.side_stream())) {
  if (kind == LaneKind::kQueued) return;
  thread_ = std::thread([this, name] {
    c10::setThreadName(name);
    const c10::OptionalStreamGuard guard(stream_);
    run();
  });
}

Lane::~Lane() { close(); }

void Lane::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Lane::record(std::shared_ptr<trace::Recorder> recorder, const std::string& row) {
  recorder_ = std::move(recorder);
  row_ = recorder_->row(row);
}

Fence Lane::submit(std::function<void()> work) {
  // [Note: Order on a device] The event `after` makes the lane's stream wait for the caller's
  // stream; the fence's event lets other streams wait for the lane's stream.
  Task task{std::move(work), {}, {}};
  task.fence.state_ = std::make_shared<Fence::FenceState>();
  task.fence.state_->device = &device_;
  if (recorder_ && recorder_->on()) {
    task.fence.state_->recorder = recorder_;
    task.fence.state_->line = trace::Recorder::line_here();
    task.fence.state_->flow = recorder_->next_flow();
    task.fence.state_->row = row_;
  }
  if (stream_) task.after.emplace(device_.current());
  const Fence fence = task.fence;
  if (closing_) {
    task.fence.set(closed_error());
    return fence;
  }
  if (!thread_.joinable()) {
    const c10::OptionalStreamGuard guard(stream_);
    run(task);
    return fence;
  }
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(task));
  changed_.notify_all();
  return fence;
}

void Lane::run(Task& task) {
  const int16_t row_before = trace::Recorder::set_row_here(row_);
  const trace::AtLine at(task.fence.state_->line);
  if (!error_) {
    try {
      const trace::Span span(recorder_.get(), trace::Kind::kLine, task.fence.state_->line,
                             task.fence.state_->flow);
      if (task.after) task.after->block(*stream_);
      task.work();
    } catch (...) {  // kept; every later wait throws it
      error_ = std::current_exception();
    }
  }
  task.work = nullptr;  // frees the objects of the work before the fence is set
  if (stream_) {
    try {
      task.fence.state_->queued.emplace(*stream_);
    } catch (...) {  // the device failed
      if (!error_) error_ = std::current_exception();
    }
  }
  task.fence.set(error_);
  trace::Recorder::set_row_here(row_before);
}

void Lane::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (closing_) break;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    run(task);
    lock.lock();
  }
  for (const Task& task : queue_) task.fence.set(closed_error());
}

}  // namespace penstock::device
