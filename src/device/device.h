#pragma once
// Device: where the model computes, either the host's processors or an accelerator. Only torch's
// generic interfaces are used, so nothing here depends on the accelerator's kind.
//
// [Note: Order on a device] Work that a thread queues goes to the thread's current stream. Device
// memory is freed in stream order, on the stream that is current when the memory is freed. This is
// also true of pinned memory that device copies use. The thread that frees the memory must first
// make that stream wait for all other users of the memory (Fence::wait).
//
// [Note: Contexts] A thread begins on device 0. To record or free an event of another device, the
// thread switches to that device and then back to device 0. This also makes a context on device 0
// (0.5 GB on a GPU). So every thread that works with events first makes the events' device its
// current device.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>

#include "src/device/address.h"
#include "src/place/placement.h"

namespace penstock::device {

// Usable from any thread. Functions that check is_host() also work if the device is the host; all
// others are for accelerators only.
class Device {
 public:
  explicit Device(c10::Device where);
  static const Device& host();

  bool is_host() const { return where_.is_cpu(); }
  c10::Device where() const { return where_; }
  // Returns `at` as an address in this device's memory.
  Address at(void* at) const { return {at, is_host() ? nullptr : this}; }

  c10::Stream current() const;  // the calling thread's stream
  // Returns a high-priority stream for moves. Torch cycles through a few such streams.
  c10::Stream side_stream() const;
  void make_current() const;  // for the calling thread ([Note: Contexts])
  // Allocates with the caching allocator, for the calling thread's stream.
  c10::DataPtr allocate(int64_t bytes) const;
  c10::DataPtr allocate_pinned(int64_t bytes) const;
  // Frees pinned memory once the copies queued on this thread's stream so far are done.
  void give_back_pinned(c10::DataPtr memory) const;
  // Records that `stream` used memory that was allocated for another stream. Must be called before
  // the memory is freed.
  void used_on(const c10::DataPtr& memory, const c10::Stream& stream) const;
  // Returns the number of bytes that can still be allocated on the device. Returns nothing if the
  // device does not report it.
  std::optional<int64_t> free_bytes() const;
  // Blocks the host until all work of this thread's stream is done.
  void synchronize() const;

 private:
  c10::Device where_;
};

at::ScalarType scalar_type(Dtype dtype);
// The inverse of scalar_type(). Returns nothing if the engine does not compute in that type.
std::optional<Dtype> find_dtype(at::ScalarType type);
// Returns the values at `at` as a one-dimensional tensor that does not own them.
at::Tensor view(Address at, Dtype dtype, int64_t numel);
at::Tensor view(Address at, at::ScalarType type, int64_t numel);

// RAII: hides the engine's own operations from autograd, autocast and the user's dispatch modes.
class Unseen {
 public:
  Unseen();

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard modes_;
};

}  // namespace penstock::device
