#pragma once
// ShmWork and ShmQueue: the collectives of a ShmBackend, run in the order of their calls.
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace penstock::comm {

// The work object that a caller waits on. Either another thread completes it, or the calling thread
// itself completes it before add() returns.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, std::vector<at::Tensor> results);

  // Runs body() and completes the work. An exception of body() becomes the work's error. Must be
  // called only once.
  void run(std::function<void()> body);
  void end(std::exception_ptr error);
  void set_source(int rank) { source_ = rank; }

  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<at::Tensor> results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  int source_ = -1;
};

// The queue has one thread, which starts with the first asynchronous collective. Any thread may
// call the methods.
class ShmQueue {
 public:
  ShmQueue() = default;
  ~ShmQueue() { close(); }
  ShmQueue(const ShmQueue&) = delete;
  ShmQueue& operator=(const ShmQueue&) = delete;

  // Blocks until all queued collectives are done or have failed, and joins the thread.
  void close();
  // If `at_once`, runs body() on the calling thread, after all earlier collectives.
  void add(const c10::intrusive_ptr<ShmWork>& work, std::function<void()> body, bool at_once);

 private:
  struct QueuedCollective {
    c10::intrusive_ptr<ShmWork> work;
    std::function<void()> body;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<QueuedCollective> entries_;  // guarded by mutex_, like the members below
  bool busy_ = false, closing_ = false;
  std::thread thread_;
};

}  // namespace penstock::comm
