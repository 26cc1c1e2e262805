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
std::atomic<int64_t> attempts{0};  // calls of count_tensors() for the host in this process
std::atomic<bool> counts{false};

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

// Torch's allocator for the CPU, counted. It stays alive until the process ends, because tensors
// that it allocated may live that long.
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

CountingAllocator counting;

class HostTensors final : public TensorMemory {
 public:
  HostTensors() : attempt_(attempts.load()) { c10::SetCPUAllocator(&counting); }
  ~HostTensors() override {
    if (c10::GetCPUAllocator() == &counting) {
      c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
    }
    counts.store(false);
  }
  int64_t now() const override { return bytes_now.load(); }
  int64_t take_peak() override { return std::max(now(), bytes_peak.exchange(now())); }
  bool alone() const override { return attempts.load() == attempt_; }

 private:
  const int64_t attempt_;
};

class DeviceTensors final : public TensorMemory {
 public:
  DeviceTensors(c10::DeviceAllocator& allocator, c10::DeviceIndex index)
      : allocator_(allocator), index_(index), peak_(bytes().peak) {}
  int64_t now() const override { return bytes().current; }
  int64_t take_peak() override {
    const int64_t peak = bytes().peak;
    return std::exchange(peak_, peak) < peak ? peak : 0;
  }
  bool alone() const override { return true; }

 private:
  c10::CachingAllocator::Stat bytes() const {
    constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return allocator_.getDeviceStats(index_).allocated_bytes[kAll];
  }

  c10::DeviceAllocator& allocator_;
  const c10::DeviceIndex index_;
  int64_t peak_;
};

}  // namespace

std::unique_ptr<TensorMemory> count_tensors(const Device& device) {
  if (!device.is_host()) {
    const c10::Device where = device.where();
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(where.type()));
    if (allocator == nullptr) return nullptr;
    return std::make_unique<DeviceTensors>(*allocator, where.index());
  }
  attempts.fetch_add(1);
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator() || counts.exchange(true)) {
    return nullptr;
  }
  auto memory = std::make_unique<HostTensors>();
  if (c10::GetCPUAllocator() != &counting) return nullptr;  // somebody's had a higher priority
  return memory;
}

}  // namespace penstock::device
