#pragma once
// ShmMessages: point-to-point messages of a ShmBackend. Any number of them can be in progress.
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/comm/shm/exchange.h"
#include "src/comm/shm/work_queue.h"

namespace penstock::comm {

// Any thread may call the methods. The object has its own thread, which moves the messages and
// sleeps while there are none.
class ShmMessages {
 public:
  explicit ShmMessages(ShmFabric& fabric) : fabric_(fabric) {}
  ~ShmMessages() { close(); }
  ShmMessages(const ShmMessages&) = delete;
  ShmMessages& operator=(const ShmMessages&) = delete;

  struct Message {
    bool out = false;
    int peer = 0;       // < 0: any rank
    at::Tensor values;  // contiguous
    uint32_t tag = 0;
    std::chrono::milliseconds limit{};
  };
  // Joins the thread. Must be called after the fabric's end(), which makes messages in progress
  // fail.
  void close();
  // Messages that have the same peer and the same tag arrive in the order of the add() calls.
  void add(const c10::intrusive_ptr<ShmWork>& work, const Message& message);

 private:
  struct PendingMessage {
    c10::intrusive_ptr<ShmWork> work;
    Message message;
    ShmFabric::Clock::time_point deadline;
    std::unique_ptr<ShmExchange> exchange;  // null until its peer is known
  };
  void run();
  bool wait_for_work(std::deque<PendingMessage>& entries);
  bool advance(std::deque<PendingMessage>& entries);
  bool advance(PendingMessage& entry, std::vector<PendingMessage*>& waiting);
  bool connect(PendingMessage& entry);
  void sleep(uint32_t seen, const std::deque<PendingMessage>& entries);

  ShmFabric& fabric_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<PendingMessage> added_;  // guarded by mutex_, like the members below
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace penstock::comm
