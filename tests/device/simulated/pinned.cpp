#include "tests/device/simulated/pinned.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tests/device/simulated/control.h"
#include "tests/device/simulated/stream.h"

namespace penstock::sim {
namespace {

constexpr size_t kHostPage = 4096;

struct Buffer {
  size_t bytes = 0;
  std::vector<MarkPointer> uses;
};

void free_buffer(void* pointer);

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_buffer, at::kCPU};
    std::unique_lock lock(mutex_);
    TORCH_CHECK(!fails_, "[sim] cannot pin ", bytes, " bytes of host memory");
    reap();
    size_t size = kHostPage;
    const size_t offset = offset_;
    while (size < bytes + offset) size *= 2;  // as in CUDA's cache
    char* pointer = nullptr;
    const auto cached = cached_.lower_bound(size);
    const bool is_new = cached == cached_.end() || cached->first != size;
    if (!is_new) {
      pointer = cached->second;
      cached_.erase(cached);
    } else {
      pointer = map(size);
    }
    stats_.active_bytes.increase(size);
    lock.unlock();
    if (is_new) note_new_memory("pinned");
    return {pointer + offset, pointer, &free_buffer, at::kCPU};
  }

  void free(char* pointer) {
    const std::lock_guard lock(mutex_);
    Buffer& buffer = buffers_.at(pointer);
    stats_.active_bytes.decrease(buffer.bytes);
    if (buffer.uses.empty()) {
      cache(pointer, buffer);
    } else {
      deferred_.push_back(pointer);
    }
  }

  bool owns(const void* pointer) {
    const std::lock_guard lock(mutex_);
    return find(pointer) != buffers_.end();
  }

  void set_offset(size_t bytes) {
    const std::lock_guard lock(mutex_);
    offset_ = bytes;
  }

  void set_fails(bool fails) {
    const std::lock_guard lock(mutex_);
    fails_ = fails;
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    const std::lock_guard lock(mutex_);
    const auto found = find(pointer);
    if (found == buffers_.end()) return false;
    auto& uses = found->second.uses;
    std::erase_if(uses, is_done);
    uses.push_back(record(stream));
    return true;
  }
  void empty_cache() override {
    note_new_memory("pinned");  // CUDA waits also where it frees pinned memory
    const std::lock_guard lock(mutex_);
    reap();
    for (const auto& [bytes, pointer] : cached_) {
      munmap(pointer, bytes);
      buffers_.erase(pointer);
      stats_.allocated_bytes.decrease(bytes);
    }
    cached_.clear();
  }
  at::HostStats get_stats() override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_buffer; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  using Buffers = std::map<const char*, Buffer>;

  char* map(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "[sim] cannot allocate ", bytes, " bytes to pin");
    auto* pointer = static_cast<char*>(memory);
    buffers_[pointer].bytes = bytes;
    stats_.allocated_bytes.increase(bytes);
    return pointer;
  }

  // A late read of the freed buffer gets NaN. The buffer that was freed last is reused first.
  void cache(char* pointer, const Buffer& buffer) {
    std::memset(pointer, 0xFF, buffer.bytes);
    cached_.emplace_hint(cached_.lower_bound(buffer.bytes), buffer.bytes, pointer);
  }

  void reap() {
    std::erase_if(deferred_, [this](char* pointer) {
      Buffer& buffer = buffers_.at(pointer);
      if (!std::all_of(buffer.uses.begin(), buffer.uses.end(), is_done)) return false;
      buffer.uses.clear();
      cache(pointer, buffer);
      return true;
    });
  }

  Buffers::iterator find(const void* pointer) {
    const auto* address = static_cast<const char*>(pointer);
    auto next = buffers_.upper_bound(address);
    if (next == buffers_.begin()) return buffers_.end();
    const auto candidate = std::prev(next);
    return address < candidate->first + candidate->second.bytes ? candidate : buffers_.end();
  }

  std::mutex mutex_;
  Buffers buffers_;  // in use and cached; mutex_ guards this and cached_
  std::multimap<size_t, char*> cached_;
  std::vector<char*> deferred_;
  at::HostStats stats_;
  size_t offset_ = 0;
  bool fails_ = false;
};

// Never destroyed: other static objects free pinned memory when the process ends.
PinnedAllocator& instance() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

void free_buffer(void* pointer) {
  if (pointer) instance().free(static_cast<char*>(pointer));
}

const bool pinned_registered = [] {
  at::setHostAllocator(c10::kPrivateUse1, &instance());
  return true;
}();

}  // namespace

at::HostAllocator& pinned_allocator() { return instance(); }

bool is_pinned(const void* pointer) { return instance().owns(pointer); }

void set_pinning_fails(bool fails) { instance().set_fails(fails); }

void set_pinned_offset(size_t bytes) { instance().set_offset(bytes); }

size_t pinned_bytes() { return static_cast<size_t>(instance().get_stats().active_bytes.current); }

}  // namespace penstock::sim
