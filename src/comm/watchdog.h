#pragma once
// Watchdog: a rank's board, and a line on stderr for each wait that is longer than it should be.
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

// Owned by a group. A transport's own waits cannot be woken half-way (gloo gives a connection up
// whose wait has timed out), so a thread looks at the board: once per `warn`, and when a wait that
// it saw then is due.
class Watchdog {
 public:
  // Both from the watch's thread.
  using Say = std::function<void(const std::string& line)>;
  using Look = std::function<std::chrono::milliseconds()>;  // says when to look again

  // No thread without peers, nor where `warn` is 0 until there is something to look_at().
  Watchdog(int rank, int size, const WatchOptions& options, Say say = to_stderr);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  Board& board() { return board_; }
  // Besides the board; once.
  void look_at(Look also);

 private:
  void start();
  static void to_stderr(const std::string& line);
  void run();
  // Warns of what is due, and says how long nothing else is.
  std::chrono::milliseconds look();

  Board board_;
  const std::chrono::milliseconds warn_;
  const Say say_;
  std::map<std::string, int64_t> warned_;  // watch's thread only: by lane, its last such collective
  std::mutex mutex_;
  std::condition_variable changed_;
  Look also_;  // guarded by mutex_, as below
  bool closing_ = false, renewed_ = false;
  std::thread thread_;
};

}  // namespace penstock::comm
