#pragma once
// Exchange: what a process group is to the engine, for ranks that are threads of one test. One
// object for all ranks; every method may be called by any of them. Nothing here waits for ever: a
// rank that is late, disagrees or has failed ends all ranks with an error.
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace penstock::plans {

using Buffers = std::vector<std::vector<double>>;

class Exchange {
 public:
  explicit Exchange(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  // Every rank of `group` gives its buffers and gets everybody's, in the order of `group`. They
  // must agree on `text` and on the sizes. Throws RuntimeFault.
  std::shared_ptr<const std::vector<Buffers>> all(int rank, const std::vector<int>& group,
                                                  const std::string& text, Buffers mine);

  // Ends every wait, now and later; the first reason is kept.
  void abort(const std::string& reason);

 private:
  struct Meeting {
    std::string text;
    std::shared_ptr<std::vector<Buffers>> given;
    size_t num_arrived = 0;
    std::condition_variable complete;
  };

  void fail_locked(const std::string& reason);

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // guards what follows
  std::map<std::pair<std::vector<int>, int>, std::shared_ptr<Meeting>> meetings_;
  std::map<std::pair<std::vector<int>, int>, int> num_calls_;  // by group and rank
  std::string failure_;
};

}  // namespace penstock::plans
