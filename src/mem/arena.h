#pragma once
// Arena: the engine's memory. Every byte is counted under the account it was taken for, and no more
// is taken than its budget. Arenas of one kind of memory share a Pool: buffers of equal size (of
// nearly equal size, when they are large) are reused; unused ones of other sizes are returned to
// the system before they would take the pool beyond the most that was ever in use. So what it holds
// is hardly more than its peak.
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

// Bytes live now and at most since the last reset_peak().
struct Usage {
  std::array<int64_t, kNumAccounts> now{}, peak{};
  int64_t total_now = 0, total_peak = 0;
  int64_t held = 0;  // by the pool from the system: in use and unused
};

// The most that may be in use. `name` is what the error calls the memory and says of the limit
// ("device memory (memory.device_bytes)"); `advice`, asked for then, what would fit.
struct Budget {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::string name;
  std::function<std::string()> advice;
};

// kPinned: of the host, for asynchronous copies to and from a device.
enum class MemoryKind : uint8_t { kHost, kPinned, kDevice };

// Buffers of one kind of memory. Any thread; arenas call it. Beside a device, memory is given back
// in the order of the stream of who does ([Note: Order on a device]), and handed out in that of who
// takes it.
class Pool {
 public:
  // The device outlives it. Where pinned memory cannot be had, it is the host's, with one warning.
  explicit Pool(MemoryKind kind = MemoryKind::kHost,
                const device::Device& device = device::Device::host());

  void set_budget(Budget budget);
  // Contents are undefined; where `wanted` is unused and fits, it is that. Throws RuntimeFault with
  // the bytes asked for, in use and allowed.
  c10::DataPtr take(int64_t bytes, const void* wanted = nullptr);
  void give_back(c10::DataPtr data, int64_t bytes);
  void forget(int64_t bytes);  // what was taken and never comes back
  int64_t held() const;
  void reset_peak();
  void trim();  // returns unused buffers to the system
  device::Address address(const c10::DataPtr& data) const {
    return {data.get(), kind_ == MemoryKind::kDevice ? &device_ : nullptr};
  }

 private:
  struct Unused {
    c10::DataPtr data;
    std::optional<c10::Event> after;  // what used it last
    c10::Stream stream;
  };
  using Buffers = std::list<Unused>;  // of one size, the last given back first

  void evict(int64_t room);  // unused buffers, the largest first, until that much is free
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

// A buffer taken from an arena; gives it back when destroyed. Move-only; any thread.
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
  const device::Device* device_ = nullptr;  // of device memory
  int64_t bytes_ = 0;
  Account account_ = Account::kParam;
};

// Gives the system back what malloc keeps of freed tensors, once `bytes` more of them add up to
// much: large aligned buffers seldom fit the holes that others left. Any thread.
void trim_heap(int64_t bytes);

// Outlives its leases. Any thread.
class Arena {
 public:
  explicit Arena(Pool& pool) { pools_.fill(&pool); }

  // Before the first take(): that account's memory comes from another pool.
  void use(Account account, Pool& pool) { pools_[static_cast<size_t>(account)] = &pool; }
  void set_budget(Budget budget);
  // As Pool::take().
  Lease take(int64_t bytes, Account account, const void* wanted = nullptr);
  Usage usage() const;
  void reset_peak();
  // The buffer with this address is never reused and never freed: the system may yet write to it.
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
