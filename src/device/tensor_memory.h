#pragma once
// TensorMemory: the memory of the tensors that torch allocates on a device.
#include <cstdint>
#include <memory>

#include "src/device/device.h"

namespace penstock::device {

// Counts from its construction. On an accelerator the numbers come from torch's allocator, so they
// include the engine's own buffers. On the host they are the bytes of tensors that are allocated
// while this object exists, in this process: other memory of the heap is not counted. Usable from
// any thread.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
  virtual int64_t now() const = 0;
  // Returns the most bytes since the last call, or 0 if that is not known: torch keeps one peak of
  // an accelerator, which users may read, so it is not reset here.
  virtual int64_t take_peak() = 0;
  // Returns whether the numbers belong to this object's engine alone. Another object that counted
  // the same memory belongs to another engine of this process.
  virtual bool alone() const = 0;
};

// Returns null if the memory cannot be counted: the allocator has no statistics, is not torch's, or
// another object counts the host's memory already.
std::unique_ptr<TensorMemory> count_tensors(const Device& device);

}  // namespace penstock::device
