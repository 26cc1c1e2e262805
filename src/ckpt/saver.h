#pragma once
// Saver: the save that is under way behind training's back, one at a time.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "src/ckpt/save.h"

namespace penstock::ckpt {

// How all ranks' shards become a checkpoint; rank 0's has a draft.
struct MergeStep {
  std::unique_ptr<Draft> draft;
  int world = 1;
  int keep = 0;
  bool behind = false;               // nobody waits for it
  std::function<void()> starting{};  // called first
  std::chrono::milliseconds timeout{};
};

// Calls from the compute thread.
class Saver {
 public:
  ~Saver() { finish_alone(); }

  // Begins to write what was captured. The one before has finished.
  void start(std::unique_ptr<Save> save, MergeStep merge);
  bool busy() const { return thread_.joinable() && !ended_; }
  // Waits for it. The error of this rank's part, and on rank 0 of the whole; once.
  std::string finish();
  // The same; but other ranks, of which some may be gone, get a few seconds for theirs.
  std::string finish_alone();
  // The same without waiting: empty while it is under way.
  std::string poll() { return thread_.joinable() && ended_ ? finish() : ""; }
  const std::string& path() const { return path_; }  // of the last that finished well, on rank 0

 private:
  void run(Save& save, MergeStep& merge);

  std::unique_ptr<Save> save_;
  MergeStep merge_;
  std::thread thread_;
  std::atomic<bool> ended_ = false;
  std::atomic<std::chrono::steady_clock::time_point> end_;  // of the wait for other ranks
  std::string error_, path_;                                // the thread's until it has ended
};

}  // namespace penstock::ckpt
