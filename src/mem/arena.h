#pragma once
// Arena: the engine's memory. Every byte is counted under the account it was taken for, and no more
// is taken than its budget. Arenas of one kind of memory share a Pool: buffers of equal size (of
// nearly equal size, when they are large) are reused; unused ones of other sizes are returned to
// the system before they would take the pool beyond the most that was ever in use. So what it holds
// is hardly more than its peak.
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

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

// Buffers of one kind of memory. Any thread; arenas call it.
class Pool {
 public:
  explicit Pool(c10::Device device) : device_(device) {}

  void set_budget(Budget budget);
  // Contents are undefined. Throws RuntimeFault with the bytes asked for, in use and allowed.
  c10::DataPtr take(int64_t bytes);
  void give_back(c10::DataPtr data, int64_t bytes);
  void forget(int64_t bytes);  // what was taken and never comes back
  int64_t held() const;
  void reset_peak();
  void trim();  // returns unused buffers to the system

 private:
  void evict(int64_t room);  // unused buffers, the largest first, until that much is free

  const c10::Device device_;
  mutable std::mutex mutex_;
  Budget budget_;
  std::map<int64_t, std::vector<c10::DataPtr>> unused_;  // by size; no empty entries
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
  char* data() const { return static_cast<char*>(data_.get()); }
  int64_t bytes() const { return bytes_; }

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  c10::DataPtr data_;
  int64_t bytes_ = 0;
  Account account_ = Account::kParam;
};

// Gives the system back what malloc keeps of freed tensors, once `bytes` more of them add up to
// much: large aligned buffers seldom fit the holes that others left. Any thread.
void trim_heap(int64_t bytes);

// Outlives its leases. Any thread.
class Arena {
 public:
  explicit Arena(Pool& pool) : pool_(pool) {}

  void set_budget(Budget budget);
  // Contents are undefined. Throws RuntimeFault with the bytes asked for, in use and allowed.
  Lease take(int64_t bytes, Account account);
  Usage usage() const;
  void reset_peak();
  // The buffer with this address is never reused and never freed: the system may yet write to it.
  void keep(const char* address);
  // Returns unused buffers to the system.
  void trim() { pool_.trim(); }

 private:
  friend class Lease;
  void give_back(Lease& lease);
  void count(Account account, int64_t bytes);

  Pool& pool_;
  mutable std::mutex mutex_;
  Budget budget_;
  Usage usage_;
  std::vector<const char*> kept_;  // addresses
};

}  // namespace penstock::mem
