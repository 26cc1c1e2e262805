#pragma once
// TensorMemory: the memory of the tensors that torch allocates on a device.
#include <cstdint>
#include <memory>

#include "src/device/device.h"

namespace penstock::device {

// On an accelerator the numbers come from torch's allocator, so they include the engine's own
// buffers. On the host they are the bytes of tensors that torch's allocator for the CPU allocated
// in this process while an object of this class existed. Memory from elsewhere (numpy, shared
// memory, scratch of kernels) is not counted. Any thread may read the numbers. Construction and
// destruction replace torch's allocator for the CPU, one pointer, while other threads allocate.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
  virtual int64_t now() const = 0;
  // Returns the most bytes since the last call. On an accelerator, returns 0 unless the peak of the
  // whole run has risen: users may read that peak, so it is never reset here.
  virtual int64_t take_peak() = 0;
  // Returns whether the numbers belong to one engine: since the construction, no other engine of
  // this process has trained or has tried to count, and nobody has replaced the allocator.
  virtual bool alone() const = 0;
};

// Returns null if the memory cannot be counted: the allocator has no statistics or is not torch's,
// or another object counts the host's memory already.
std::unique_ptr<TensorMemory> count_tensors(const Device& device);

// An engine that does not count trains, so no counting engine of this process is alone.
void disturb_counts();

}  // namespace penstock::device
