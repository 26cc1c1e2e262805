#pragma once
// Arena: the engine's memory. Buffers of equal size are reused; unused ones of other sizes are
// returned to the system before they would take the arena beyond the most that was ever in use. So
// what it holds is never more than its peak. Every byte is counted under the account it was taken
// for.
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace penstock::mem {

enum class Account : uint8_t { kParam, kGrad, kOptim, kBuffers, kAct };
inline constexpr int kNumAccounts = 5;

// Bytes live now and at most since the last reset_peak().
struct Usage {
  std::array<int64_t, kNumAccounts> now{}, peak{};
  int64_t total_now = 0, total_peak = 0;
  int64_t held = 0;  // from the system: in use and unused
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
  explicit Arena(c10::Device device);

  // Contents are undefined. Throws RuntimeFault with the bytes asked for and in use.
  Lease take(int64_t bytes, Account account);
  Usage usage() const;
  void reset_peak();
  // Returns unused buffers to the system.
  void trim();

 private:
  friend class Lease;
  void give_back(Lease& lease);
  void count(Account account, int64_t bytes);
  void evict(int64_t room);  // unused buffers, the largest first, until that much is free

  const c10::Device device_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<c10::DataPtr>> unused_;  // by size; no empty entries
  int64_t unused_bytes_ = 0;
  Usage usage_;
};

}  // namespace penstock::mem
