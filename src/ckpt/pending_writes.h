#pragma once
// PendingWrites: the parts of a save that are not written yet, and where their bytes are.
//
// [Note: Behind training's back] When a save begins, it does not copy the state that only the
// engine changes. The save's thread writes this state directly from its resting place. Code that is
// about to change the state (the optimizer, a write to swap) calls the ChangeWatch first. If the
// save has already written the state, the call returns at once. Otherwise, the call copies the
// state if it is in memory, and waits for the save if the state is on disk. So a save uses memory
// only for state that training changes before the save has written it.
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

// The source of the bytes of a region: memory, or the swap file.
struct Source {
  Holding holding;               // if its buffer is null, the source is `kept`
  int64_t first = 0, numel = 0;  // range of elements in the holding
  int64_t bytes = 0;
  at::Tensor kept;  // contiguous
  // For masters on disk: the values that the same elements of the parameters had when the save
  // began.
  at::Tensor edits;
  mem::Lease copy;
  const char* data = nullptr;              // null: on disk
  const device::Device* device = nullptr;  // owner of `data`; null: the host
  int64_t offset = 0;                      // byte offset in the swap file
};

class PendingWrites final : public mem::ChangeWatch {
 public:
  explicit PendingWrites(mem::Tiers& tiers) : tiers_(tiers) {}

  // Call before any other thread uses this object. `stays`: true if the bytes will not change.
  void add(Source source, bool stays);
  Source& at(size_t index) { return sources_[index]; }
  size_t size() const { return sources_.size(); }

  // Returns the index of the source to write next, or nothing if no source is left. Only the save's
  // thread calls it.
  std::optional<size_t> next();
  bool hurries() const { return hurries_ > 0; }  // a thread waits until a source is written
  void done(const std::vector<size_t>& written);
  void abandon();  // stops the save; waiting threads continue

  void memory_changes(const char* data, int64_t bytes) override;
  void disk_changes(int64_t offset, int64_t bytes) override;

 private:
  enum class Stage : uint8_t { kWaiting, kCopying, kGivenOut, kDone };

  void wait_for(std::unique_lock<std::mutex>& lock, size_t index);
  void copy(std::unique_lock<std::mutex>& lock, size_t index);

  mem::Tiers& tiers_;
  std::vector<Source> sources_;
  std::vector<Stage> stages_;            // guarded by mutex_
  std::map<int64_t, size_t> in_memory_;  // sources that may change, by first byte
  std::map<int64_t, size_t> on_disk_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<size_t> urgent_;    // guarded by mutex_
  size_t next_ = 0;               // guarded by mutex_
  std::atomic<size_t> left_ = 0;  // number of sources that are not done
  std::atomic<int> hurries_ = 0;
};

}  // namespace penstock::ckpt
