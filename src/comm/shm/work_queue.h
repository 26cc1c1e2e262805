#pragma once
// ShmWork and ShmQueue: collectives of a ShmBackend, in the order in which they were called.
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace penstock::comm {

// What a caller waits for; done by one other thread, or before it is handed out.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, std::vector<at::Tensor> results);

  // Once; an exception is the work's.
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

// One thread, begun with the first work that its caller does not wait for. From any thread.
class ShmQueue {
 public:
  ShmQueue() = default;
  ~ShmQueue() { close(); }
  ShmQueue(const ShmQueue&) = delete;
  ShmQueue& operator=(const ShmQueue&) = delete;

  // Once what is queued is done, or has failed.
  void close();
  // `at_once`: by this thread, when all before it is done.
  void add(const c10::intrusive_ptr<ShmWork>& work, std::function<void()> body, bool at_once);

 private:
  struct QueuedCollective {
    c10::intrusive_ptr<ShmWork> work;
    std::function<void()> body;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<QueuedCollective> entries_;  // guarded by mutex_, as below
  bool busy_ = false, closing_ = false;
  std::thread thread_;
};

}  // namespace penstock::comm
