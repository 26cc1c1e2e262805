#pragma once
// Arena: counts and limits the engine's memory. Every byte is counted under the account for which
// it was taken, and the budget bounds the total. Arenas of one kind of memory share a Pool. The
// pool reuses buffers of equal size (large buffers also for nearly equal sizes). If a new buffer
// would take the pool above its highest use so far, it first returns unused buffers to the system.
// So a pool holds hardly more than its peak use.
#include <c10/core/Allocator.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "src/device/device.h"
#include "src/device/stream_event.h"

namespace penstock::mem {

enum class Account : uint8_t { kParam, kGrad, kOptim, kBuffers, kAct };
inline constexpr int kNumAccounts = 5;

// Bytes in use now, and the maximum since the last reset_peak().
struct Usage {
  std::array<int64_t, kNumAccounts> now{}, peak{};
  int64_t total_now = 0, total_peak = 0;
  int64_t held = 0;  // bytes that the pool has from the system, used or unused
};

// The limit on bytes in use. `name` names the memory and its limit in error texts: "device
// memory (memory.device_bytes)". `advice` is called only for an error, and returns a text that says
// what would fit.
struct Budget {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::string name;
  std::function<std::string()> advice;
};

// kPinned: host memory for asynchronous copies to and from a device.
enum class MemoryKind : uint8_t { kHost, kPinned, kDevice };

// Buffers of one kind of memory. Arenas call a pool from any thread. With a device, give_back()
// follows the order of the calling thread's stream, and take() makes the buffer safe to use on the
// calling thread's stream ([Note: Order on a device], device.h).
class Pool {
 public:
  // The device must outlive the pool. If no pinned memory can be allocated, the pool takes pageable
  // host memory and warns once.
  explicit Pool(MemoryKind kind = MemoryKind::kHost,
                const device::Device& device = device::Device::host());

  void set_budget(Budget budget);
  int64_t room() const;  // bytes that its budget has left
  // Returns a buffer with undefined contents. Prefers the buffer at `wanted` if that is unused and
  // has the right size. Throws RuntimeFault with the bytes requested, in use and allowed.
  c10::DataPtr take(int64_t bytes, const void* wanted = nullptr);
  void give_back(c10::DataPtr data, int64_t bytes);
  void forget(int64_t bytes);  // stops counting memory that will never be given back
  int64_t held() const;
  int64_t peak() const;  // the most bytes in use since the last reset_peak()
  void reset_peak();
  void trim();  // returns unused buffers to the system
  device::Address address(const c10::DataPtr& data) const {
    return {data.get(), kind_ == MemoryKind::kDevice ? &device_ : nullptr};
  }

 private:
  struct Unused {
    c10::DataPtr data;
    std::optional<device::StreamEvent> after;  // the last use on the device
    c10::Stream stream;
  };
  using Buffers = std::list<Unused>;  // of one size, the most recently given back first

  // Frees the largest unused buffers until `room` bytes fit below the highest use.
  void evict(int64_t room);
  void free(Unused unused) const;
  c10::DataPtr allocate(int64_t bytes, int64_t used);  // `used`: bytes that the first user needs
  int64_t slot_bytes(int64_t bytes) const;
  Buffers::iterator choose(Buffers& buffers, const void* wanted) const;
  bool stands_by(Unused& unused) const;
  std::optional<c10::Device> on_device() const;

  const MemoryKind kind_;
  const device::Device& device_;
  mutable std::mutex mutex_;
  Budget budget_;
  std::map<int64_t, Buffers> unused_;  // by size; no empty entries
  int64_t unused_bytes_ = 0, in_use_ = 0, most_in_use_ = 0;
};

class Arena;

// A buffer taken from an arena. The destructor gives it back. Move-only; usable from any thread.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { reset(); }

  void reset();
  explicit operator bool() const { return arena_ != nullptr; }
  device::Address data() const { return {data_.get(), device_}; }
  int64_t bytes() const { return bytes_; }

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  c10::DataPtr data_;
  const device::Device* device_ = nullptr;  // null for host memory
  int64_t bytes_ = 0;
  Account account_ = Account::kParam;
};

// Counts `bytes` of freed tensors. After every 16 MiB, makes malloc return free memory to the
// system: large aligned buffers seldom fit into the holes in the heap. Callable from any thread.
void trim_heap(int64_t bytes);

// Must outlive its leases. Usable from any thread.
class Arena {
 public:
  explicit Arena(Pool& pool) { pools_.fill(&pool); }

  // Makes take() use this pool for the account. Call it before the first take().
  void use(Account account, Pool& pool) { pools_[static_cast<size_t>(account)] = &pool; }
  void set_budget(Budget budget);
  int64_t room() const;  // bytes that its budget has left
  // See Pool::take().
  Lease take(int64_t bytes, Account account, const void* wanted = nullptr);
  Usage usage() const;
  void reset_peak();
  // Marks the buffer with this address: it is never reused or freed, because the system may still
  // write to it.
  void keep(const char* address);
  // Returns unused buffers to the system.
  void trim();

 private:
  friend class Lease;
  void give_back(Lease& lease);
  void count(Account account, int64_t bytes);

  std::set<Pool*> distinct() const;
  Pool& pool_of(Account account) const { return *pools_[static_cast<size_t>(account)]; }

  std::array<Pool*, kNumAccounts> pools_{};
  mutable std::mutex mutex_;
  Budget budget_;
  Usage usage_;
  std::vector<const char*> kept_;  // addresses
};

}  // namespace penstock::mem
