#pragma once
// Watchdog: a rank's board, and a line on stderr for each wait that takes longer than `warn`.
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

// Owned by a group. A transport's wait cannot be interrupted for a warning: gloo drops a connection
// when a wait on it times out. So a thread looks at the board once per `warn`, and when a wait that
// it saw becomes due.
class Watchdog {
 public:
  // Both are called on the watchdog's thread.
  using Say = std::function<void(const std::string& line)>;
  using Look = std::function<std::chrono::milliseconds()>;  // returns when to look again

  // Starts no thread without peers. If `warn` is 0, starts it only at look_at().
  Watchdog(int rank, int size, const WatchOptions& options, Say say = to_stderr);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  Board& board() { return board_; }
  // Also calls `also` on the watchdog's thread. Call it once.
  void look_at(Look also);

 private:
  void start();
  static void to_stderr(const std::string& line);
  void run();
  // Warns of the waits that are due. Returns the time until the next one is due.
  std::chrono::milliseconds look();

  Board board_;
  const std::chrono::milliseconds warn_;
  const Say say_;
  std::map<std::string, int64_t> warned_;  // last collective warned of, by lane; watchdog's thread
  std::mutex mutex_;
  std::condition_variable changed_;
  Look also_;  // guarded by mutex_, as below
  bool closing_ = false, renewed_ = false;
  std::thread thread_;
};

}  // namespace penstock::comm
