#pragma once
// Arena: counts and limits the engine's memory. Every byte is counted under the account it was
// taken for, and the budget bounds the total. Arenas of one kind of memory share a Pool, which
// reuses buffers of equal size (for large buffers: of nearly equal size). It returns unused buffers
// of other sizes to the system before the pool would exceed the highest use so far. So a pool holds
// hardly more than its peak use.
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>

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

namespace penstock::mem {

enum class Account : uint8_t { kParam, kGrad, kOptim, kBuffers, kAct };
inline constexpr int kNumAccounts = 5;

// Bytes in use now, and the maximum since the last reset_peak().
struct Usage {
  std::array<int64_t, kNumAccounts> now{}, peak{};
  int64_t total_now = 0, total_peak = 0;
  int64_t held = 0;  // bytes that the pool holds from the system, in use or unused
};

// The limit on bytes in use. `name` names the memory and its limit in the error: "device memory
// (memory.device_bytes)". `advice` is called for the error only; it returns what would fit.
struct Budget {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::string name;
  std::function<std::string()> advice;
};

// kPinned: host memory for asynchronous copies to and from a device.
enum class MemoryKind : uint8_t { kHost, kPinned, kDevice };

// Buffers of one kind of memory. Any thread; arenas call it. With a device, give_back() follows the
// order of the calling thread's stream, and take() orders the buffer for the stream of its caller
// ([Note: Order on a device], device.h).
class Pool {
 public:
  // The device must outlive the pool. If no pinned memory can be allocated, the pool takes pageable
  // host memory and warns once.
  explicit Pool(MemoryKind kind = MemoryKind::kHost,
                const device::Device& device = device::Device::host());

  void set_budget(Budget budget);
  // The contents are undefined. If the buffer at `wanted` is unused and has the size, returns that
  // buffer. Throws RuntimeFault with the bytes asked for, in use and allowed.
  c10::DataPtr take(int64_t bytes, const void* wanted = nullptr);
  void give_back(c10::DataPtr data, int64_t bytes);
  void forget(int64_t bytes);  // no longer counts memory that is never given back
  int64_t held() const;
  void reset_peak();
  void trim();  // returns unused buffers to the system
  device::Address address(const c10::DataPtr& data) const {
    return {data.get(), kind_ == MemoryKind::kDevice ? &device_ : nullptr};
  }

 private:
  struct Unused {
    c10::DataPtr data;
    std::optional<c10::Event> after;  // the last use on the device
    c10::Stream stream;
  };
  using Buffers = std::list<Unused>;  // buffers of one size, the most recently given back first

  // Frees the largest unused buffers until `room` bytes fit below the highest use.
  void evict(int64_t room);
  void free(Unused unused) const;
  c10::DataPtr allocate(int64_t bytes);
  int64_t slot_bytes(int64_t bytes) const;
  Buffers::iterator choose(Buffers& buffers, const void* wanted) const;
  bool stands_by(Unused& unused) const;

  const MemoryKind kind_;
  const device::Device& device_;
  mutable std::mutex mutex_;
  Budget budget_;
  std::map<int64_t, Buffers> unused_;  // by size; no empty entries
  int64_t unused_bytes_ = 0, in_use_ = 0, most_in_use_ = 0;
};

class Arena;

// A buffer taken from an arena. Its destructor gives the buffer back. Move-only; any thread.
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

// Counts `bytes` of freed tensors. After every 16 MiB it makes malloc return its free memory to the
// system, because large aligned buffers seldom fit into the holes in the heap. Any thread.
void trim_heap(int64_t bytes);

// Must outlive its leases. Any thread.
class Arena {
 public:
  explicit Arena(Pool& pool) { pools_.fill(&pool); }

  // Takes the memory of that account from another pool. Call it before the first take().
  void use(Account account, Pool& pool) { pools_[static_cast<size_t>(account)] = &pool; }
  void set_budget(Budget budget);
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
