#include "src/mem/arena.h"

#include <malloc.h>
#include <sys/mman.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <set>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/mem/block_io.h"
#include "src/mem/keep_until_exit.h"

namespace penstock::mem {

namespace {

constexpr int64_t kHugePage = 2 << 20;
const c10::Stream kNoStream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));

// Each large buffer has its own mapping, so it leaves no hole in the heap. The mapping requests
// huge pages; if the system refuses, the pages are small. Small pages make the optimizer's passes a
// tenth slower, because these passes are bound by memory bandwidth and must look up more pages.
struct Mapping {
  void* base;
  size_t bytes;
};

// A huge page takes all its memory at the first touch, so only pages below `used` bytes are huge.
// The remaining part of the mapping is reserved for other sizes and takes no memory.
c10::DataPtr map_large(int64_t bytes, int64_t used) {
  const auto size = static_cast<size_t>(block_padded(bytes));
  void* base = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  const auto begin = (reinterpret_cast<uintptr_t>(base) + kHugePage - 1) / kHugePage * kHugePage;
  auto* data = reinterpret_cast<void*>(begin);
  madvise(data, static_cast<size_t>(used / kHugePage * kHugePage), MADV_HUGEPAGE);
  const auto unmap = [](void* context) {
    const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
    munmap(mapping->base, mapping->bytes);
  };
  return {data, new Mapping{base, size + kHugePage}, unmap, c10::Device(c10::DeviceType::CPU)};
}

// Host buffers consist of whole blocks, so that any buffer can be written to disk.
c10::DataPtr allocate_host(int64_t bytes, int64_t used) {
  if (bytes >= 2 * kHugePage) return map_large(bytes, used);
  void* data = nullptr;
  const int error = posix_memalign(&data, kBlockBytes, static_cast<size_t>(block_padded(bytes)));
  if (error != 0) throw std::bad_alloc();
  return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
}

// Returns pinned memory that begins at a block. Most allocators return whole pages. CUDA's does not
// if it registers memory of malloc (pinned_use_cuda_host_register), and XPU's aligns to 512 bytes.
c10::DataPtr allocate_aligned(const device::Device& device, int64_t bytes) {
  const auto address = [](const c10::DataPtr& data) {
    return reinterpret_cast<uintptr_t>(data.get());
  };
  c10::DataPtr data = device.allocate_pinned(bytes);
  if (address(data) % kBlockBytes == 0) return data;
  data.clear();
  data = device.allocate_pinned(bytes + kBlockBytes);
  const auto block = static_cast<uintptr_t>(kBlockBytes);
  auto* const begin = reinterpret_cast<void*>((address(data) + block - 1) / block * block);
  const auto free = [](void* context) { delete static_cast<c10::DataPtr*>(context); };
  return {begin, new c10::DataPtr(std::move(data)), free, c10::Device(c10::DeviceType::CPU)};
}

c10::DataPtr allocate_pinned(const device::Device& device, int64_t bytes) {
  try {
    return allocate_aligned(device, block_padded(bytes));
  } catch (const c10::Error& error) {
    TORCH_WARN_ONCE(
        "penstock: ", format_bytes(bytes), " of pinned memory cannot be allocated (",
        error.what_without_backtrace(),
        "): host memory will not be pinned, and copies to and from the device will block. "
        "Raise ulimit -l, or the container's limit on locked memory");
  }
  return allocate_host(bytes, bytes);
}

void check_budget(const Budget& budget, int64_t bytes, int64_t in_use) {
  if (bytes <= budget.bytes - in_use) return;
  throw RuntimeFault(concat("[mem::Arena::take] ", budget.name, ": the ", format_bytes(in_use),
                            " in use on this rank plus ", format_bytes(bytes), " more is over the ",
                            format_bytes(budget.bytes), " allowed",
                            budget.advice ? "; " + budget.advice() : ""));
}

}  // namespace

void trim_heap(int64_t bytes) {
  constexpr int64_t kMuch = 16 << 20;
  static std::atomic<int64_t> freed = 0;
  if (freed.fetch_add(bytes) + bytes < kMuch) return;
  freed = 0;
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

Lease::Lease(Lease&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::exchange(other.data_, c10::DataPtr())),
      device_(other.device_),
      bytes_(std::exchange(other.bytes_, 0)),
      account_(other.account_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    reset();
    arena_ = std::exchange(other.arena_, nullptr);
    data_ = std::exchange(other.data_, c10::DataPtr());
    device_ = other.device_;
    bytes_ = std::exchange(other.bytes_, 0);
    account_ = other.account_;
  }
  return *this;
}

void Lease::reset() {
  if (arena_ != nullptr) arena_->give_back(*this);
  arena_ = nullptr;
  data_ = c10::DataPtr();
  bytes_ = 0;
}

Pool::Pool(MemoryKind kind, const device::Device& device) : kind_(kind), device_(device) {}

void Pool::set_budget(Budget budget) {
  const std::lock_guard lock(mutex_);
  budget_ = std::move(budget);
}

int64_t Pool::room() const {
  const std::lock_guard lock(mutex_);
  return budget_.bytes - in_use_;
}

c10::DataPtr Pool::allocate(int64_t bytes, int64_t used) {
  switch (kind_) {
    case MemoryKind::kHost:
      return allocate_host(bytes, used);
    case MemoryKind::kPinned:
      return allocate_pinned(device_, bytes);
    case MemoryKind::kDevice:
      return device_.allocate(bytes);
  }
  throw Bug("[mem::Pool::allocate] unknown kind");
}

// Rounds the sizes of large host buffers up by at most a sixteenth, so that buffers of nearly equal
// size can replace each other. Pages that are not touched take no memory.
int64_t Pool::slot_bytes(int64_t bytes) const {
  if (kind_ == MemoryKind::kDevice || bytes < 2 * kHugePage) return bytes;
  const auto step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes))) / 16;
  return (bytes + step - 1) / step * step;
}

// Returns whether the buffer can be used without waiting: by the host, or by the device's current
// stream.
bool Pool::stands_by(Unused& unused) const {
  if (!unused.after) return true;
  if (kind_ == MemoryKind::kDevice) return unused.stream == device_.current();
  return unused.after->query();
}

// Prefers the buffer at `wanted`, so that a unit returns to its old address. Otherwise picks a
// buffer without a wait. If there is none, picks the buffer that was given back last.
Pool::Buffers::iterator Pool::choose(Buffers& buffers, const void* wanted) const {
  for (auto one = buffers.begin(); one != buffers.end() && wanted != nullptr; ++one) {
    if (one->data.get() == wanted) return one;
  }
  for (auto one = buffers.begin(); one != buffers.end(); ++one) {
    if (stands_by(*one)) return one;
  }
  return buffers.begin();
}

// Waits and allocates without the mutex, so that lanes with other memory go on.
c10::DataPtr Pool::take(int64_t bytes, const void* wanted) {
  const c10::OptionalDeviceGuard guard(on_device());
  std::unique_lock lock(mutex_);
  // An arena checks its own budget first. All arenas of the pool share this budget.
  check_budget(budget_, bytes, in_use_);
  const int64_t before = in_use_, most_before = most_in_use_, slot = slot_bytes(bytes);
  std::optional<Unused> chosen;
  const auto unused = unused_.find(slot);
  if (unused != unused_.end()) {
    const auto found = choose(unused->second, wanted);
    chosen.emplace(std::move(*found));
    unused->second.erase(found);
    unused_bytes_ -= slot;
    if (unused->second.empty()) unused_.erase(unused);
  } else {
    evict(bytes);
  }
  in_use_ += bytes;
  most_in_use_ = std::max(most_in_use_, in_use_);
  lock.unlock();
  try {
    if (!chosen) return allocate(slot, bytes);
    // Device memory is ordered on the stream; pinned memory is used by the host, which must wait.
    if (chosen->after && kind_ == MemoryKind::kDevice) chosen->after->block(device_.current());
    if (chosen->after && kind_ == MemoryKind::kPinned) chosen->after->synchronize();
    return std::move(chosen->data);
  } catch (const std::exception& error) {
    if (chosen) chosen->data.release_context();  // the device failed and may still use it
    lock.lock();
    in_use_ -= bytes;
    if (most_in_use_ == before + bytes) most_in_use_ = std::max(most_before, in_use_);
    throw RuntimeFault(concat("[mem::Arena::take] cannot allocate ", format_bytes(bytes), " with ",
                              format_bytes(before), " in use on this rank: ", error.what()));
  }
}

void Pool::give_back(c10::DataPtr data, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const c10::OptionalDeviceGuard guard(on_device());
  in_use_ -= bytes;
  const int64_t slot = slot_bytes(bytes);
  Unused unused{std::move(data), {}, kNoStream};
  if (kind_ != MemoryKind::kHost) {
    try {
      unused.stream = device_.current();
      unused.after.emplace(unused.stream);
    } catch (const std::exception&) {
      // The device failed. It is unknown what still uses the memory, so the memory is never reused.
      // Leases end in destructors, so nothing is thrown here.
      unused.data.release_context();
      return;
    }
  }
  unused_[slot].push_front(std::move(unused));
  unused_bytes_ += slot;
}

// Gives the memory back to the system, or to torch's caching allocator, which waits for the stream.
void Pool::free(Unused unused) const {
  if (!unused.after) return;
  if (kind_ == MemoryKind::kDevice) return device_.used_on(unused.data, unused.stream);
  try {
    unused.after->synchronize();
  } catch (const c10::Error&) {  // the device failed, so nothing runs on it
  }
}

void Pool::forget(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  in_use_ -= bytes;
}

void Pool::evict(int64_t room) {
  // A pool never holds more than the highest use so far.
  const int64_t in_use = in_use_ + room;
  const int64_t most = std::max(most_in_use_, in_use);
  while (!unused_.empty() && in_use + unused_bytes_ > most) {
    const auto largest = std::prev(unused_.end());
    unused_bytes_ -= largest->first;
    free(std::move(largest->second.back()));
    largest->second.pop_back();
    if (largest->second.empty()) unused_.erase(largest);
  }
}

int64_t Pool::held() const {
  const std::lock_guard lock(mutex_);
  return in_use_ + unused_bytes_;
}

int64_t Pool::peak() const {
  const std::lock_guard lock(mutex_);
  return most_in_use_;
}

void Pool::reset_peak() {
  const std::lock_guard lock(mutex_);
  most_in_use_ = in_use_;
}

// Returns the device to which the buffers' events belong ([Note: Contexts]).
std::optional<c10::Device> Pool::on_device() const {
  return kind_ == MemoryKind::kHost ? std::nullopt : std::optional(device_.where());
}

void Pool::trim() {
  const std::lock_guard lock(mutex_);
  const c10::OptionalDeviceGuard guard(on_device());
  for (auto& [bytes, buffers] : unused_) {
    for (Unused& unused : buffers) free(std::move(unused));
  }
  unused_.clear();
  unused_bytes_ = 0;
}

void Arena::set_budget(Budget budget) {
  const std::lock_guard lock(mutex_);
  budget_ = std::move(budget);
}

int64_t Arena::room() const {
  const std::lock_guard lock(mutex_);
  return budget_.bytes - usage_.total_now;
}

void Arena::count(Account account, int64_t bytes) {
  const auto i = static_cast<size_t>(account);
  usage_.now[i] += bytes;
  usage_.peak[i] = std::max(usage_.peak[i], usage_.now[i]);
  usage_.total_now += bytes;
  usage_.total_peak = std::max(usage_.total_peak, usage_.total_now);
}

Lease Arena::take(int64_t bytes, Account account, const void* wanted) {
  Usage before;
  {
    const std::lock_guard lock(mutex_);
    check_budget(budget_, bytes, usage_.total_now);
    before = usage_;
    count(account, bytes);
  }
  Pool& pool = pool_of(account);
  Lease lease;
  try {
    lease.data_ = pool.take(bytes, wanted);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    const auto i = static_cast<size_t>(account);
    const bool highest = usage_.peak[i] == before.now[i] + bytes;
    const bool highest_total = usage_.total_peak == before.total_now + bytes;
    count(account, -bytes);
    if (highest) usage_.peak[i] = std::max(before.peak[i], usage_.now[i]);
    if (highest_total) usage_.total_peak = std::max(before.total_peak, usage_.total_now);
    throw;
  }
  lease.device_ = pool.address(lease.data_).device;
  lease.arena_ = this;
  lease.bytes_ = bytes;
  lease.account_ = account;
  return lease;
}

void Arena::give_back(Lease& lease) {
  const std::lock_guard lock(mutex_);
  count(lease.account_, -lease.bytes_);
  const char* data = lease.data().data;
  if (std::any_of(kept_.begin(), kept_.end(), [&](const char* address) {
        return address >= data && address < data + lease.bytes_;
      })) {
    pool_of(lease.account_).forget(lease.bytes_);
    return keep_for_good(std::move(lease.data_));
  }
  pool_of(lease.account_).give_back(std::move(lease.data_), lease.bytes_);
}

Usage Arena::usage() const {
  const std::lock_guard lock(mutex_);
  Usage usage = usage_;
  for (const Pool* pool : distinct()) usage.held += pool->held();
  return usage;
}

void Arena::trim() {
  for (Pool* pool : distinct()) pool->trim();
}

std::set<Pool*> Arena::distinct() const { return {pools_.begin(), pools_.end()}; }

void Arena::reset_peak() {
  const std::lock_guard lock(mutex_);
  usage_.peak = usage_.now;
  usage_.total_peak = usage_.total_now;
  for (Pool* pool : distinct()) pool->reset_peak();
}

void Arena::keep(const char* address) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(address);
}

}  // namespace penstock::mem
