#pragma once
// Shelf: a tier on which tensors wait until they are needed. Parked: the values of one such tensor.
//
// With a device, the bytes travel on a separate stream, through pinned memory. On disk, each parked
// tensor is an extent of a file that grows to the largest number of bytes in use.
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "src/device/device.h"
#include "src/device/stream_event.h"
#include "src/mem/arena.h"
#include "src/mem/extents.h"
#include "src/place/placement.h"

namespace penstock::activations {

// Shared with the parked tensors, which may outlive its first owner.
class Shelf : public std::enable_shared_from_this<Shelf> {
 public:
  explicit Shelf(Tier tier, const device::Device& computes = device::Device::host());

  // Call before the first tensor is parked, if the tier is the disk.
  void open_disk(const mem::DiskOptions& options);
  // Frees unused memory. The file is closed when the last parked tensor is gone.
  void close();

  const device::Device& computes() const { return device_; }
  // Returns a tensor without values in the memory in which the model computes. If that is host
  // memory, the tensor counts as memory of the shelf.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type);

  int64_t peak_bytes() const;  // bytes in memory
  int64_t disk_bytes() const;
  int64_t live_bytes() const;  // bytes in memory and on disk now

 private:
  friend class Parked;
  device::StreamEvent copy(const at::Tensor& to, const at::Tensor& from) const;

  const Tier tier_;
  const device::Device device_;
  const std::optional<c10::Stream> stream_;
  mem::Pool pool_;
  mem::Arena arena_{pool_};
  // Shared with the parked tensors; the file is closed when the last owner ends.
  std::shared_ptr<mem::Extents> extents_;
};

// Only the model's thread may use this object. It may be destroyed on any thread.
class Parked {
 public:
  // Starts to move the values of a one-dimensional tensor to the shelf. Throws RuntimeFault if the
  // disk has no room for them.
  Parked(std::shared_ptr<Shelf> shelf, const at::Tensor& values);
  ~Parked();
  Parked(const Parked&) = delete;
  Parked& operator=(const Parked&) = delete;

  // Starts to bring the values back. Does nothing if they are being brought.
  void bring();
  // Waits for the values, and returns them where the model computes. The tensor must not be used
  // after release(). Throws RuntimeFault for I/O errors.
  at::Tensor values();
  // Frees what bring() took, after transfers in flight. The values stay on the shelf. Throws
  // RuntimeFault for I/O errors.
  void release();
  // Frees the memory of values that were written to the disk, and starts the write of values that
  // have arrived in host memory. Returns whether nothing is left to do.
  bool settle();

 private:
  at::Tensor content() const;
  void copy_back();
  void write();
  void leave();
  void arrive();

  const std::shared_ptr<Shelf> shelf_;
  const at::ScalarType dtype_;
  const int64_t numel_, bytes_;
  mem::Lease memory_;  // holds the values at rest; for values on disk, only while they are loaded
  std::shared_ptr<mem::Extents> extents_;
  int64_t offset_ = -1;  // in the swap file; -1: not on disk
  mem::DiskTicket moving_;
  std::optional<device::StreamEvent> copied_;  // end of the copy to the host
  at::Tensor back_;                            // values on the device, or being copied there
  std::optional<device::StreamEvent> came_;    // end of the copy to the device
  bool wanted_ = false;                        // bring() was called, release() not yet
};

}  // namespace penstock::activations
