#include "src/device/tensor_memory.h"

#include <malloc.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace penstock::device {

namespace {

std::atomic<int64_t> bytes_now{0}, bytes_peak{0};
// Engines of this process that trained or tried to count, each once per event.
std::atomic<int64_t> engines_seen{0};
std::atomic<bool> counts{false};  // an object counts the host's memory

void add(int64_t bytes) {
  const int64_t now = bytes_now.fetch_add(bytes) + bytes;
  int64_t peak = bytes_peak.load();
  while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) {
  }
}

void free_counted(void* memory) {
  bytes_now.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)));
  c10::GetDefaultCPUAllocator()->raw_deallocate(memory);
}

// Torch's allocator for the CPU, counted.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    add(static_cast<int64_t>(malloc_usable_size(memory)));
    return {memory, memory, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// Never destroyed: tensors that it allocated may live until the process ends.
CountingAllocator& counting = *new CountingAllocator;

bool is_installed() { return c10::GetCPUAllocator() == &counting; }

class HostTensors final : public TensorMemory {
 public:
  explicit HostTensors(int64_t seen) : seen_(seen) { c10::SetCPUAllocator(&counting); }
  ~HostTensors() override {
    if (is_installed()) c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
    counts.store(false);
  }
  int64_t now() const override { return bytes_now.load(); }
  int64_t take_peak() override { return std::max(now(), bytes_peak.exchange(now())); }
  bool alone() const override { return engines_seen.load() == seen_ && is_installed(); }

 private:
  const int64_t seen_;
};

class DeviceTensors final : public TensorMemory {
 public:
  // Throws c10::Error if the allocator has no statistics.
  DeviceTensors(c10::DeviceAllocator& allocator, c10::DeviceIndex index, int64_t seen)
      : allocator_(allocator), index_(index), seen_(seen), peak_(bytes().peak) {}
  int64_t now() const override { return bytes().current; }
  int64_t take_peak() override {
    const int64_t peak = bytes().peak;
    return std::exchange(peak_, peak) < peak ? peak : 0;
  }
  bool alone() const override { return engines_seen.load() == seen_; }

 private:
  c10::CachingAllocator::Stat bytes() const {
    constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return allocator_.getDeviceStats(index_).allocated_bytes[kAll];
  }

  c10::DeviceAllocator& allocator_;
  const c10::DeviceIndex index_;
  const int64_t seen_;
  int64_t peak_;
};

}  // namespace

std::unique_ptr<TensorMemory> count_tensors(const Device& device) {
  const int64_t seen = engines_seen.fetch_add(1) + 1;
  if (!device.is_host()) {
    const c10::Device where = device.where();
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(where.type()));
    if (allocator == nullptr) return nullptr;
    try {
      return std::make_unique<DeviceTensors>(*allocator, where.index(), seen);
    } catch (const c10::Error&) {
      return nullptr;
    }
  }
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return nullptr;
  if (counts.exchange(true)) {
    disturb_counts();  // the other object may have been made between the two lines above
    return nullptr;
  }
  auto memory = std::make_unique<HostTensors>(seen);
  if (!is_installed()) return nullptr;  // somebody's allocator had a higher priority
  return memory;
}

void disturb_counts() { engines_seen.fetch_add(1); }

}  // namespace penstock::device
