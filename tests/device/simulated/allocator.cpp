#include "tests/device/simulated/allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/control.h"
#include "tests/device/simulated/redzone.h"
#include "tests/device/simulated/stream.h"

namespace penstock::sim {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kPage = 4096;
constexpr size_t kSmall = size_t{1} << 20;  // sizes from this one up are rounded to pages

struct Block {
  Block(char* pointer, size_t size, c10::Stream stream)
      : pointer(pointer), size(size), stream(stream) {}

  char* const pointer;
  const size_t size;  // without redzones
  const c10::Stream stream;
  size_t asked = 0;  // bytes that the last user requested
  bool is_new = true;
  std::vector<c10::Stream> used_on;
  std::vector<MarkPointer> pending;
  std::atomic<int> verifications{0};  // number of queued verifications

  Extent extent() const { return {static_cast<char*>(shadow(pointer)), size, asked}; }
};

size_t rounded(size_t bytes) {
  const size_t unit = bytes < kSmall ? kRedzoneBytes : kPage;
  return (bytes + unit - 1) / unit * unit;
}

// The blocks of one device. Every method takes the pool's lock and never waits for a stream while
// it holds the lock, because queued work may need another thread that allocates memory.
class Pool {
 public:
  explicit Pool(int device) : device_(device) { holes_[kPage] = kArenaBytes - 2 * kPage; }

  char* allocate(size_t bytes) {
    throw_if_failed(device_);
    const size_t size = rounded(bytes);
    const c10::Stream stream = current_stream(device_);
    Block* block = take(size, bytes, stream);
    if (!block) {  // like CUDA, frees the whole cache and tries again
      give_back("allocator");
      block = take(size, bytes, stream);
    }
    if (block && block->is_new) note_new_memory("allocator");
    const std::lock_guard lock(mutex_);
    if (!block) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "[sim] out of memory. Tried to allocate ", bytes,
                       " bytes on device ", device_, ", which has ", limit_.load(), ", of which ",
                       reserved_, " are reserved");
    }
    stats_.allocation[0].increase(1);
    stats_.allocated_bytes[0].increase(block->size);
    stats_.active_bytes[0].increase(block->size);
    stats_.requested_bytes[0].increase(bytes);
    block->is_new = false;
    return block->pointer;
  }

  void free(char* pointer) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(pointer);
    TORCH_INTERNAL_ASSERT(found != live_.end(), "[sim] freed twice, or never allocated");
    Block* block = found->second;
    live_.erase(found);
    stats_.allocation[0].decrease(1);
    stats_.allocated_bytes[0].decrease(block->size);
    stats_.requested_bytes[0].decrease(block->asked);
    for (const c10::Stream& stream : block->used_on) block->pending.push_back(record(stream));
    block->used_on.clear();
    deferred_.push_back(block);
    reap();
  }

  void record_stream(char* pointer, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(pointer);
    if (found == live_.end() || found->second->stream == stream) return;
    auto& streams = found->second->used_on;
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }

  // Waits for the device, as cudaFree does, and frees all blocks that are not in use.
  void give_back(const std::string& why) {
    synchronize_device(device_, why);
    {
      const std::lock_guard lock(mutex_);
      reap();
    }
    drain_device(device_);  // waits for the work that reap() has queued
    const std::lock_guard lock(mutex_);
    if (why == "allocator") ++stats_.num_alloc_retries;
    for (auto& [stream, blocks] : cached_) {
      std::erase_if(blocks, [this](const auto& cached) {
        if (cached.second->verifications > 0) return false;  // another thread has queued one
        unmap(cached.second);
        return true;
      });
    }
    join_holes();
  }

  void check_live() {
    drain_device(device_);
    throw_if_failed(device_);
    const std::lock_guard lock(mutex_);
    for (const auto& [pointer, block] : live_) {
      const std::string wrong = violation(block->extent());
      TORCH_CHECK(wrong.empty(), "[sim] device ", device_, ": ", wrong);
    }
  }

  // A kernel's argument must lie in one block that is in use.
  void check_bounds(char* begin, size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto block = live_.upper_bound(begin);
    const bool in_use = block != live_.begin() && begin < (--block)->first + block->second->asked;
    TORCH_CHECK(in_use, "[sim] device ", device_, ": a kernel was given memory that is not in use");
    const size_t room = block->first + block->second->asked - begin;
    TORCH_CHECK(bytes <= room, "[sim] device ", device_, ": ", bytes,
                " bytes were given to a kernel, but the block ends after ", room);
  }

  void note_temporary(size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto* stat : {&stats_.allocated_bytes, &stats_.requested_bytes}) {
      (*stat)[0].increase(bytes);
      (*stat)[0].decrease(bytes);
    }
  }

  DeviceStats stats() {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_peaks() {
    const std::lock_guard lock(mutex_);
    for (auto* stat : {&stats_.allocation, &stats_.allocated_bytes, &stats_.active_bytes,
                       &stats_.reserved_bytes, &stats_.requested_bytes}) {
      (*stat)[0].reset_peak();
    }
  }

  std::pair<size_t, size_t> free_and_total() {
    const std::lock_guard lock(mutex_);
    const size_t limit = limit_;
    return {limit - std::min(limit, reserved_), limit};
  }

  void set_limit(size_t bytes) { limit_ = bytes; }

 private:
  // Returns a cached block of this stream or else a new one. Returns null if there is no memory.
  Block* take(size_t size, size_t bytes, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    reap();
    auto& blocks = cached_[stream.id()];
    const auto fit = blocks.lower_bound(size);
    Block* block = nullptr;
    if (fit != blocks.end() && fit->first <= size + size / 4) {
      block = fit->second;
      blocks.erase(fit);
      hand_out(block, bytes);
    } else if ((block = map(size, stream))) {
      block->asked = bytes;
      poison(block->extent());  // no stream can use it yet
    }
    if (block) live_[block->pointer] = block;
    return block;
  }

  // Overwrites the old contents on the block's stream, because the new user may write the block at
  // once on that stream. The free does not overwrite them, because a read on another stream may
  // still be ordered before the next use on this stream.
  static void hand_out(Block* block, size_t bytes) {
    const Extent before = block->extent();
    block->asked = bytes;
    enqueue(block->stream, [before, after = block->extent()] {
      const std::string wrong = violation(before);
      poison(after);
      TORCH_CHECK(wrong.empty(), wrong);
    });
  }

  // Caches the blocks that were freed and that no stream uses any more.
  void reap() {
    const auto in_use = [](const Block* block) {
      return !std::all_of(block->pending.begin(), block->pending.end(), is_done);
    };
    const auto first = std::stable_partition(deferred_.begin(), deferred_.end(), in_use);
    for (auto it = first; it != deferred_.end(); ++it) {
      Block* block = *it;
      block->pending.clear();
      stats_.active_bytes[0].decrease(block->size);
      ++block->verifications;
      enqueue(block->stream, [block, extent = block->extent()] {
        const std::string wrong = violation(extent);
        if (!wrong.empty()) fence(extent);  // so that the violation is reported only once
        --block->verifications;
        TORCH_CHECK(wrong.empty(), wrong);
      });
      auto& blocks = cached_[block->stream.id()];
      // The block that was freed last is reused first, because this order finds the most errors.
      blocks.emplace_hint(blocks.lower_bound(block->size), block->size, block);
    }
    deferred_.erase(first, deferred_.end());
  }

  Block* map(size_t size, c10::Stream stream) {
    if (reserved_ + size > limit_) return nullptr;
    const size_t bytes = size + 2 * kRedzoneBytes;
    const auto fits = [bytes](const auto& hole) { return hole.second >= bytes; };
    const auto hole = std::find_if(holes_.begin(), holes_.end(), fits);
    if (hole == holes_.end()) return nullptr;
    const auto [offset, room] = *hole;
    holes_.erase(hole);
    if (room > bytes) holes_[offset + bytes] = room - bytes;
    reserved_ += size;
    stats_.reserved_bytes[0].increase(size);
    ++stats_.num_device_alloc;
    return new Block(arena(device_) + offset + kRedzoneBytes, size, stream);
  }

  void unmap(Block* block) {
    char* begin = block->pointer - kRedzoneBytes;
    const size_t bytes = block->size + 2 * kRedzoneBytes;
    auto* memory = static_cast<char*>(shadow(begin));
    const size_t skip = (kPage - reinterpret_cast<size_t>(memory) % kPage) % kPage;
    const size_t pages = bytes > skip ? (bytes - skip) / kPage : 0;
    if (pages > 0) madvise(memory + skip, pages * kPage, MADV_DONTNEED);
    holes_[begin - arena(device_)] = bytes;
    reserved_ -= block->size;
    stats_.reserved_bytes[0].decrease(block->size);
    ++stats_.num_device_free;
    delete block;
  }

  void join_holes() {
    for (auto hole = holes_.begin(); hole != holes_.end();) {
      const auto next = std::next(hole);
      if (next != holes_.end() && hole->first + hole->second == next->first) {
        hole->second += next->second;
        holes_.erase(next);
      } else {
        hole = next;
      }
    }
  }

  const int device_;
  std::atomic<size_t> limit_{size_t{4} << 30};
  std::mutex mutex_;
  std::map<size_t, size_t> holes_;  // bytes by offset; mutex_ guards this and all members below
  std::map<c10::StreamId, std::multimap<size_t, Block*>> cached_;
  std::vector<Block*> deferred_;
  std::map<char*, Block*> live_;
  size_t reserved_ = 0;
  DeviceStats stats_;
};

// Never destroyed: other static objects free device memory when the process ends.
Pool& pool(int device) {
  static auto* const pools = [] {
    auto* created = new std::vector<Pool*>;
    for (int index = 0; index < kDevices; ++index) created->push_back(new Pool(index));
    return created;
  }();
  return *pools->at(device < 0 ? current_device() : device);
}

void free_block(void* pointer) {
  if (!pointer || is_forked()) return;
  pool(device_of(pointer)).free(static_cast<char*>(pointer));
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    char* pointer = bytes > 0 ? pool(device).allocate(bytes) : nullptr;
    return {pointer, pointer, &free_block, sim_device(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    launch(current_stream(), "copy_data", [=] { std::memcpy(shadow(to), shadow(from), bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { pool(-1).give_back("empty_cache"); }
  // Like CUDA's, ignores memory of other allocators, such as a window.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &free_block || !data.get_context()) return;
    auto* pointer = static_cast<char*>(data.get_context());
    pool(device_of(pointer)).record_stream(pointer, stream);
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return pool(device).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { pool(device).reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return pool(device).free_and_total();
  }
};

const bool allocator_registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
  return true;
}();

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* const allocator = new Allocator;
  return *allocator;
}

void set_memory_limit(size_t bytes, int device) {
  for (int index = 0; index < kDevices; ++index) {
    if (device < 0 || device == index) pool(index).set_limit(bytes);
  }
}

void note_temporary(int device, size_t bytes) { pool(device).note_temporary(bytes); }

void check_bounds(void* begin, size_t bytes) {
  pool(device_of(begin)).check_bounds(static_cast<char*>(begin), bytes);
}

void write_wrongly(uint64_t device_address) {
  auto* const address = reinterpret_cast<void*>(device_address);
  launch(current_stream(device_of(address)), "wrong index",
         [address] { std::memset(shadow(address), 0, 4); });
}

void check_redzones(int device) { pool(device).check_live(); }

}  // namespace penstock::sim
