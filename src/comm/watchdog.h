#pragma once
// Watchdog: owns a rank's board, and prints a line on stderr for each wait that takes longer than
// `warn`.
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "penstock/group.h"
#include "src/base/board.h"

namespace penstock::comm {

// Owned by a group. A waiting thread cannot print the warning itself: it would need a short
// timeout, but gloo drops a connection when a wait on it times out. So a separate thread checks the
// board once per `warn`, and also when the next wait on the board reaches `warn`.
class Watchdog {
 public:
  // Both are called on the watchdog's thread.
  using Say = std::function<void(const std::string& line)>;
  using Look = std::function<std::chrono::milliseconds()>;  // returns the time until the next call

  // Starts the thread if there are peers and `warn` is not 0. Otherwise look_at() starts it.
  Watchdog(int rank, int size, const WatchOptions& options, Say say = to_stderr);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  Board& board() { return board_; }
  // From now on, the watchdog's thread also calls `also`.
  void look_at(Look also);

 private:
  void start();
  static void to_stderr(const std::string& line);
  void run();
  // Warns about waits that are longer than `warn`. Returns the time until the next check.
  std::chrono::milliseconds look();

  Board board_;
  const std::chrono::milliseconds warn_;
  const Say say_;
  // For each lane, the last collective that got a warning. Used only by the watchdog's thread.
  std::map<std::string, int64_t> warned_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Look also_;  // guarded by mutex_, like the members below
  bool closing_ = false, renewed_ = false;
  std::thread thread_;
};

}  // namespace penstock::comm
