#pragma once
// Exchange: what a process group is to the engine, for ranks that are threads of one test. One
// object for all ranks; every method may be called by any of them. Nothing here waits for ever: a
// rank that is late, disagrees or has failed ends all ranks with an error.
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
  // How a message goes. kRendezvous, as NCCL has it: a send waits for its receive, and two ranks
  // take each other's messages in the order in which they were sent. kBuffered, as gloo has it: a
  // send never waits, and a receive takes the message that it names.
  enum class Transport { kRendezvous, kBuffered };

  // `world` ranks, which all say ended() at their end: where every one waits, all end at once. 0:
  // that is not looked at.
  explicit Exchange(std::chrono::milliseconds timeout, int world = 0,
                    Transport transport = Transport::kBuffered)
      : timeout_(timeout), world_(world), transport_(transport) {}

  // Every rank of `group` gives its buffers and gets everybody's, in the order of `group`. They
  // must agree on `text` and on the sizes. Throws RuntimeFault.
  std::shared_ptr<const std::vector<Buffers>> all(int rank, const std::vector<int>& group,
                                                  const std::string& text, Buffers mine);

  // From `rank` to `peer` and back; both name the same `tag`. Throw RuntimeFault.
  void post(int rank, int peer, const std::string& tag, std::vector<double> values);
  std::vector<double> take(int rank, int peer, const std::string& tag);

  // A rank makes no more calls.
  void ended();

  // Ends every wait, now and later; the first reason is kept.
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
  // Until over(), or a failure.
  void wait(std::unique_lock<std::mutex>& lock, int rank, const std::string& where,
            const std::function<bool()>& over);
  void look_for_deadlock();

  const std::chrono::milliseconds timeout_;
  const int world_;
  const Transport transport_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<Message>> letters_;  // by sender and receiver
  std::map<int, Wait> waits_;                                   // by rank
  int num_ended_ = 0;
  std::map<std::pair<std::vector<int>, int>, std::shared_ptr<Meeting>> meetings_;
  std::map<std::pair<std::vector<int>, int>, int> num_calls_;  // by group and rank
  std::string failure_;
};

}  // namespace penstock::plans
