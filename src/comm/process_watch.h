#pragma once
// ProcessWatch: reports at once when another process of this host has ended, for any reason.
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace penstock::comm {

class ProcessWatch {
 public:
  // Watches the processes in `pids`, except this process. Throws if one of them does not exist or
  // is not visible to this process. For each process that ends, this object's own thread calls
  // `ended` once, with the index in `pids`.
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
  int wake_ = -1;                             // an eventfd that wakes the thread so that it ends
  std::vector<std::pair<int, int>> watched_;  // a pidfd and its index in `pids`; used by the thread
  std::thread thread_;
};

}  // namespace penstock::comm
