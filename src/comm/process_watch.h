#pragma once
// ProcessWatch: tells at once that another process of this host has ended, however it did.
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace penstock::comm {

class ProcessWatch {
 public:
  // Of processes that can be seen from here (throws where one is not there); this process itself
  // and those listed twice are passed over. `ended` is called with the index in `pids`, on a thread
  // of this object's own, once for each.
  ProcessWatch(const std::vector<int64_t>& pids, std::function<void(int index)> ended);
  ~ProcessWatch();
  static bool has_ended(int64_t pid);
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

 private:
  void open(int64_t pid, int index);
  void close_all();
  void run();

  const std::function<void(int)> ended_;
  int wake_ = -1;                             // an eventfd, for the thread to end
  std::vector<std::pair<int, int>> watched_;  // a pidfd, and whose it is; the thread's
  std::thread thread_;
};

}  // namespace penstock::comm
