#pragma once
// Exchange: stands in for a process group, for ranks that are threads of one test. All ranks share
// one object, and any rank may call any method. No call waits forever: if a rank is late, disagrees
// or has failed, all ranks end with an error.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
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
  // How messages are sent. kRendezvous (as in NCCL): a send waits for its receive, and two ranks
  // receive each other's messages in the order of the sends. kBuffered (as in gloo): a send never
  // waits, and a receive takes the message that it names.
  enum class Transport { kRendezvous, kBuffered };

  // `world`: number of ranks. Each of them must call ended() when it is done. If every rank that is
  // not done waits, the ranks are deadlocked, and all of them end at once with an error. 0:
  // deadlocks are not detected.
  explicit Exchange(std::chrono::milliseconds timeout, int world = 0,
                    Transport transport = Transport::kBuffered)
      : timeout_(timeout), world_(world), transport_(transport) {}

  // Every rank of `group` passes its buffers and gets the buffers of all ranks, in the order of
  // `group`. The ranks must agree on `text` and on the sizes. Throws RuntimeFault.
  std::shared_ptr<const std::vector<Buffers>> all(int rank, const std::vector<int>& group,
                                                  const std::string& text, Buffers mine);

  // post() sends values from `rank` to `peer`; take() receives values at `rank` from `peer`. Both
  // sides pass the same `tag`. Both throw RuntimeFault.
  void post(int rank, int peer, const std::string& tag, std::vector<double> values);
  std::vector<double> take(int rank, int peer, const std::string& tag);

  // Must be called when a rank makes no more calls.
  void ended();

  // Ends all waits, including later ones. Keeps the first reason.
  void abort(const std::string& reason);

 private:
  struct Meeting {
    std::string text;
    std::shared_ptr<std::vector<Buffers>> given;
    size_t num_arrived = 0;
  };
  struct Message {
    std::string tag;
    std::vector<double> values;
  };
  struct Wait {
    std::string where;
    std::function<bool()> over;
  };

  void fail_locked(const std::string& reason);
  // Waits until over() returns true, or until a failure.
  void wait(std::unique_lock<std::mutex>& lock, int rank, const std::string& where,
            const std::function<bool()>& over);
  void look_for_deadlock();

  const std::chrono::milliseconds timeout_;
  const int world_;
  const Transport transport_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<Message>> letters_;  // by sender and receiver
  std::map<int, Wait> waits_;                                   // by rank
  int num_ended_ = 0;
  std::map<std::pair<std::vector<int>, int>, std::shared_ptr<Meeting>> meetings_;
  std::map<std::pair<std::vector<int>, int>, int> num_calls_;  // by group and rank
  std::string failure_;
};

}  // namespace penstock::plans
