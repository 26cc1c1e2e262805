#pragma once
// LostRanks: the roll call. After a failure, it finds the ranks that still answer, and the position
// of each rank.
//
// [Note: Roll call] Every rank has a watch thread that waits in the store for a key of that rank.
// When an exchange fails on a rank, that rank posts its position and its error, and wakes all watch
// threads. Then it waits a grace period for the answers of the other ranks. A rank that does not
// answer is dead or stopped. A slow rank does answer, because its watch thread does not depend on
// the model's thread. The store keeps the first verdict. If the first rank that failed is gone and
// a second rank fails because of that, the second rank repeats the stored verdict and does not
// blame the first rank. When a failed rank closes its engine, the watch threads also end the
// exchanges of the ranks that wait for it ([Note: Last call], penstock/group.h).
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/group.h"

namespace penstock::comm {

// Owned by a group. Any thread may call set_position(). Only a lane that failed calls call().
class LostRanks {
 public:
  // What the watch thread does when another rank requests it.
  struct Requests {
    std::function<void(const std::string& why)> end_exchanges;
    // Returns the reason why all ranks must end their exchanges, or "" ([Note: Turns]).
    std::function<std::string(const std::string& question)> answer;
  };
  LostRanks(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix, int rank,
            int size, std::chrono::milliseconds grace, Requests requests = {});
  ~LostRanks();
  LostRanks(const LostRanks&) = delete;
  LostRanks& operator=(const LostRanks&) = delete;

  void set_position(Position position);
  // Holds the roll call, or repeats its verdict. The text has one sentence for each rank that is
  // dead or failed, then the positions of the other ranks. If the ranks have already found that
  // they make different calls ([Note: Turns]), returns that difference instead.
  std::string call(const std::string& error);
  // Ends the exchanges of all other ranks, with `why` as the reason.
  void tell(const std::string& why);
  // Asks the rank `rank` whether this rank waits for it in vain. Only one thread may call ask().
  void ask(int rank, const std::string& question);
  // How the run has been closed so far: not at all (kOpen), by all ranks together at the last call
  // (kTogether), or by at least one rank on its own (kOneByOne). For kOneByOne, `why` names that
  // rank.
  enum class Ending { kOpen, kTogether, kOneByOne };
  Ending ending(std::string* why);
  // See Group::last_call().
  std::string last_call(const std::string& fault, std::chrono::milliseconds limit);

 private:
  std::string here();
  std::string key(const char* what, int rank) const;
  std::string answer_of(int rank, std::chrono::milliseconds grace);
  std::string collect(const std::string& error);
  void wake(c10d::Store& store, int rank, const std::string& why);
  void tell(c10d::Store& store, const std::string& why);
  void hear(const std::string& why);
  void watch();
  // Stores `answer` as the answer to the last call, unless the store already has an answer. All
  // ranks use the stored answer.
  void decide(const std::string& answer);
  bool decided(std::chrono::milliseconds within);

  c10::intrusive_ptr<c10d::Store> store_, watch_store_;
  c10::intrusive_ptr<c10d::Store> asking_;  // a separate connection, made by the first ask()
  const std::string prefix_;
  const int rank_, size_;
  const std::chrono::milliseconds grace_;
  const Requests requests_;
  bool called_last_ = false;  // used only by the thread that destroys this object
  std::mutex mutex_;
  Position position_ = Position::of("before step 1");  // guarded by mutex_
  std::thread watcher_;
};

}  // namespace penstock::comm
