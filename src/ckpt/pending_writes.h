#pragma once
// PendingWrites: what of a save is still to be written, and where its bytes are.
//
// [Note: Behind training's back] State that only the engine changes is not copied when a save
// begins. The save's thread writes it from where it rests; who is about to change it (the
// optimizer, a write to swap) asks first. Then what is in memory and not written yet is copied, and
// what is on disk is written at once. So a save takes memory for what an update comes to before it,
// and no more.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "src/ckpt/inventory.h"
#include "src/mem/change_watch.h"
#include "src/mem/tiers.h"

namespace penstock::ckpt {

// Where the bytes of a region come from: memory, or the swap file.
struct Source {
  Holding holding;               // where its buffer is null: a tensor
  int64_t first = 0, numel = 0;  // elements of the holding
  int64_t bytes = 0;
  at::Tensor kept;   // contiguous
  at::Tensor edits;  // of masters on disk: parameters as they were, of the same elements
  mem::Lease copy;
  const char* data = nullptr;              // in memory; null: on disk
  const device::Device* device = nullptr;  // whose memory that is, where it is not the host's
  int64_t offset = 0;                      // on disk
};

class PendingWrites final : public mem::ChangeWatch {
 public:
  explicit PendingWrites(mem::Tiers& tiers) : tiers_(tiers) {}

  // Before anybody else knows it. `stays`: nobody will change it.
  void add(Source source, bool stays);
  Source& at(size_t index) { return sources_[index]; }
  size_t size() const { return sources_.size(); }

  // The save's thread: what to write next; nothing when all has been given out.
  std::optional<size_t> next();
  bool hurries() const { return hurries_ > 0; }  // somebody waits for what was given out
  void done(const std::vector<size_t>& written);
  void abandon();  // nothing more will be written

  void memory_changes(const char* data, int64_t bytes) override;
  void disk_changes(int64_t offset, int64_t bytes) override;

 private:
  enum class Stage : uint8_t { kWaiting, kCopying, kGivenOut, kDone };

  void wait_for(std::unique_lock<std::mutex>& lock, size_t index);
  void copy(std::unique_lock<std::mutex>& lock, size_t index);

  mem::Tiers& tiers_;
  std::vector<Source> sources_;
  std::vector<Stage> stages_;            // guarded by mutex_
  std::map<int64_t, size_t> in_memory_;  // that may change, by first byte
  std::map<int64_t, size_t> on_disk_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<size_t> urgent_;    // guarded by mutex_
  size_t next_ = 0;               // guarded by mutex_
  std::atomic<size_t> left_ = 0;  // not done
  std::atomic<int> hurries_ = 0;
};

}  // namespace penstock::ckpt
