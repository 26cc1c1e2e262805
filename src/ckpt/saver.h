#pragma once
// Saver: runs saves in the background, one at a time.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "src/ckpt/save.h"

namespace penstock::ckpt {

// Describes how the shards of all ranks become a checkpoint. Only rank 0 has a draft.
struct MergeStep {
  std::unique_ptr<Draft> draft;
  int world = 1;
  int keep = 0;
  bool behind = false;               // no thread waits for the save
  std::function<void()> starting{};  // called first, on the save's thread
  std::chrono::milliseconds timeout{};
};

// Used only by the model's thread.
class Saver {
 public:
  ~Saver() { finish_alone(); }

  // Starts to write a captured save. The previous save must have finished.
  void start(std::unique_ptr<Save> save, MergeStep merge);
  bool busy() const { return thread_.joinable() && !ended_; }
  // Waits for the save. Returns the error of this rank's part or, on rank 0, the error of any part.
  // Each error is returned only once.
  std::string finish();
  // Like finish(), but waits at most a few seconds for other ranks, which may be gone.
  std::string finish_alone();
  // Like finish(), but does not wait: it returns "" while the save runs.
  std::string poll() { return thread_.joinable() && ended_ ? finish() : ""; }
  const std::string& path() const { return path_; }  // on rank 0: the last complete checkpoint

 private:
  void run(Save& save, MergeStep& merge);

  std::unique_ptr<Save> save_;
  MergeStep merge_;
  std::thread thread_;
  std::atomic<bool> ended_ = false;
  std::atomic<std::chrono::steady_clock::time_point> end_;  // deadline of the wait for other ranks
  std::string error_, path_;  // written only by the save's thread until it ends
};

}  // namespace penstock::ckpt
