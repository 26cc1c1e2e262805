#pragma once
// Roll call: finds out, after a failure, which ranks are still there and where each of them is.
//
// [Note: Roll call] Every rank keeps a watch thread that sleeps in the store on a key of its own. A
// rank whose exchange failed posts its own position and error, wakes all watches, and waits a grace
// period for every other rank's answer; a rank that does not answer is dead or stopped. A rank
// that is merely slow answers, since its watch does not depend on its main thread. The first
// verdict is kept in the store, so ranks that fail later (because the first one left) repeat it
// instead of taking the innocent first one for the culprit. The watches also end the exchanges of
// ranks that wait for one which has failed and is closing ([Note: Last call], penstock/group.h).
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/group.h"

namespace penstock::comm {

// Owned by a group; set_position from any thread, call() from a lane that failed.
class LostRanks {
 public:
  // `end_exchanges` is called by the watch when another rank asks for it, with that one's reason.
  LostRanks(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix, int rank,
            int size, std::chrono::milliseconds grace,
            std::function<void(const std::string&)> end_exchanges = {});
  ~LostRanks();
  LostRanks(const LostRanks&) = delete;
  LostRanks& operator=(const LostRanks&) = delete;

  void set_position(Position position);
  // One sentence for each rank that is dead or failed, then where the rest are.
  std::string call(const std::string& error);
  // Ends the exchanges of all other ranks.
  void tell(const std::string& why);
  // How far the run is closed: not at all; by all ranks together, at the last call; or by one rank
  // at least on its own, of which `why` then speaks.
  enum class Ending { kOpen, kTogether, kOneByOne };
  Ending ending(std::string* why);
  // As Group::last_call().
  std::string last_call(const std::string& fault, std::chrono::milliseconds limit);

 private:
  std::string here();
  std::string key(const char* what, int rank) const;
  std::string answer_of(int rank, std::chrono::milliseconds grace);
  std::string collect(const std::string& error);
  void wake(int rank, const std::string& why);
  void watch();
  // The first answer to the last call is everyone's.
  void decide(const std::string& answer);
  bool decided(std::chrono::milliseconds within);

  c10::intrusive_ptr<c10d::Store> store_, watch_store_;
  const std::string prefix_;
  const int rank_, size_;
  const std::chrono::milliseconds grace_;
  const std::function<void(const std::string&)> end_exchanges_;
  bool called_last_ = false;  // by the thread that ends this object
  std::mutex mutex_;
  Position position_ = Position::of("before step 1");  // guarded by mutex_
  std::thread watcher_;
};

}  // namespace penstock::comm
