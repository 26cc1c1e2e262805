#include "src/comm/shm/work_queue.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/thread_name.h>

#include <exception>
#include <utility>

namespace penstock::comm {

ShmWork::ShmWork(int rank, c10d::OpType type, std::vector<at::Tensor> results)
    : Work(rank, type),
      results_(std::move(results)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
}

void ShmWork::run(std::function<void()> body) {
  std::exception_ptr error;
  try {
    body();
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  body = nullptr;  // frees the objects of body() before a waiting thread continues
  end(error);
}

void ShmWork::end(std::exception_ptr error) {
  finish(error);
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

void ShmQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void ShmQueue::add(const c10::intrusive_ptr<ShmWork>& work, std::function<void()> body,
                   bool at_once) {
  std::unique_lock lock(mutex_);
  if (!at_once) {
    entries_.push_back({work, std::move(body)});
    changed_.notify_all();
    if (thread_.joinable()) return;
    thread_ = std::thread([this] {
      c10::setThreadName("penstock-shm");
      run();
    });
    return;
  }
  if (std::this_thread::get_id() == thread_.get_id()) {  // called by a finished work's callback
    lock.unlock();
    return work->run(std::move(body));
  }
  // The calling thread waits until the queue is empty and then runs this collective itself.
  changed_.wait(lock, [this] { return entries_.empty() && !busy_; });
  busy_ = true;
  lock.unlock();
  work->run(std::move(body));
  lock.lock();
  busy_ = false;
  changed_.notify_all();
}

void ShmQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return (!entries_.empty() && !busy_) || closing_; });
    if (entries_.empty()) return;
    QueuedCollective entry = std::move(entries_.front());
    entries_.pop_front();
    busy_ = true;
    lock.unlock();
    entry.work->run(std::move(entry.body));
    // The tensors may belong to Python, and freeing them may wait for the interpreter's lock.
    entry.work.reset();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace penstock::comm
