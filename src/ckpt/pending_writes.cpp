#include "src/ckpt/pending_writes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "penstock/error.h"

namespace penstock::ckpt {

namespace {

int64_t address_of(const char* data) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
}

// Calls `each` for the sources that overlap [begin, end). Sources do not overlap each other.
template <class Each>
void overlapping(const std::map<int64_t, size_t>& by_begin, const std::vector<Source>& sources,
                 int64_t begin, int64_t end, const Each& each) {
  auto at = by_begin.upper_bound(begin);
  if (at != by_begin.begin() &&
      std::prev(at)->first + sources[std::prev(at)->second].bytes > begin) {
    --at;
  }
  for (; at != by_begin.end() && at->first < end; ++at) each(at->second);
}

}  // namespace

void PendingWrites::add(Source source, bool stays) {
  const size_t index = sources_.size();
  if (source.bytes > 0 && source.data == nullptr) on_disk_[source.offset] = index;
  if (source.bytes > 0 && source.data != nullptr && !stays) {
    in_memory_[address_of(source.data)] = index;
  }
  sources_.push_back(std::move(source));
  stages_.push_back(Stage::kWaiting);
  ++left_;
}

std::optional<size_t> PendingWrites::next() {
  std::unique_lock lock(mutex_);
  while (true) {
    while (!urgent_.empty()) {
      const size_t index = urgent_.back();
      urgent_.pop_back();
      if (stages_[index] != Stage::kWaiting) continue;
      stages_[index] = Stage::kGivenOut;
      return index;
    }
    // If a source is being copied, it becomes available when the copy ends. Until then, other
    // sources come first.
    bool copying = false;
    for (size_t index = next_; index < stages_.size(); ++index) {
      if (stages_[index] == Stage::kWaiting) {
        stages_[index] = Stage::kGivenOut;
        if (!copying) next_ = index + 1;
        return index;
      }
      copying |= stages_[index] == Stage::kCopying;
    }
    if (!copying) return {};
    changed_.wait(lock);
  }
}

void PendingWrites::done(const std::vector<size_t>& written) {
  const std::lock_guard lock(mutex_);
  for (const size_t index : written) {
    stages_[index] = Stage::kDone;
    sources_[index].copy.reset();
    --left_;
  }
  changed_.notify_all();
}

void PendingWrites::abandon() {
  const std::lock_guard lock(mutex_);
  std::fill(stages_.begin(), stages_.end(), Stage::kDone);
  left_ = 0;
  changed_.notify_all();
}

// Moves the source to the front and waits until it is written.
void PendingWrites::wait_for(std::unique_lock<std::mutex>& lock, size_t index) {
  urgent_.push_back(index);
  ++hurries_;
  changed_.wait(lock, [&] { return stages_[index] == Stage::kDone; });
  --hurries_;
}

// Copies the source. If there is no memory for a copy, waits until the source is written.
void PendingWrites::copy(std::unique_lock<std::mutex>& lock, size_t index) {
  Source& source = sources_[index];
  stages_[index] = Stage::kCopying;
  lock.unlock();
  mem::Lease copy;
  try {
    copy = tiers_.host.take(source.bytes, mem::Account::kBuffers);
    std::memcpy(copy.data().host(), source.data, static_cast<size_t>(source.bytes));
  } catch (const RuntimeFault&) {
    // There is no memory for a copy, so the source must be written now.
  }
  lock.lock();
  if (stages_[index] == Stage::kDone) return;  // abandon() was called during the wait
  stages_[index] = Stage::kWaiting;
  if (copy) {
    source.copy = std::move(copy);
    source.data = source.copy.data().host();
  }
  changed_.notify_all();
  if (!source.copy) wait_for(lock, index);
}

void PendingWrites::memory_changes(const char* data, int64_t bytes) {
  if (left_ == 0) return;
  std::unique_lock lock(mutex_);
  overlapping(in_memory_, sources_, address_of(data), address_of(data) + bytes, [&](size_t index) {
    changed_.wait(lock, [&] { return stages_[index] != Stage::kCopying; });
    if (sources_[index].copy || stages_[index] == Stage::kDone) return;
    if (stages_[index] == Stage::kWaiting) return copy(lock, index);
    // next() has already returned the source, so this waits until it is written.
    ++hurries_;
    changed_.wait(lock, [&] { return stages_[index] == Stage::kDone; });
    --hurries_;
  });
}

void PendingWrites::disk_changes(int64_t offset, int64_t bytes) {
  if (left_ == 0) return;
  std::unique_lock lock(mutex_);
  overlapping(on_disk_, sources_, offset, offset + bytes, [&](size_t index) {
    if (stages_[index] != Stage::kDone) wait_for(lock, index);
  });
}

}  // namespace penstock::ckpt
