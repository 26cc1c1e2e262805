#pragma once
// Device: where parameters compute, the host's processors or an accelerator, through torch's
// generic interfaces alone: nothing here knows which accelerator it is.
//
// [Note: Order on a device] What a thread queues goes to its current stream. Memory of the device,
// and pinned memory that it copies from and to, is given back in the order of the stream that is
// current there: who gives it back has made that stream wait for whoever else uses it
// (Fence::wait).
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

#include "src/device/address.h"
#include "src/place/placement.h"

namespace penstock::device {

// Any thread. What is not about the host as a device says so by `is_host()`; the rest is for
// accelerators alone.
class Device {
 public:
  explicit Device(c10::Device where);
  static const Device& host();

  bool is_host() const { return where_.is_cpu(); }
  c10::Device where() const { return where_; }
  // Its memory at `at`.
  Address at(void* at) const { return {at, is_host() ? nullptr : this}; }

  c10::Stream current() const;      // of the calling thread
  c10::Stream side_stream() const;  // another; torch has a few and hands them out in turn
  // Of the caching allocator, for the calling thread's stream.
  c10::DataPtr allocate(int64_t bytes) const;
  c10::DataPtr allocate_pinned(int64_t bytes) const;
  // Gives pinned memory back when all is done that its copies on this thread's stream come after.
  void give_back_pinned(c10::DataPtr memory) const;
  // Before memory that another stream used is freed.
  void used_on(const c10::DataPtr& memory, const c10::Stream& stream) const;
  // Waits on the host for what this thread's stream has been given.
  void synchronize() const;

 private:
  c10::Device where_;
};

at::ScalarType scalar_type(Dtype dtype);
// Values there as a tensor of one dimension, which owns nothing.
at::Tensor view(Address at, Dtype dtype, int64_t numel);
at::Tensor view(Address at, at::ScalarType type, int64_t numel);

// The engine's own operations: no autograd, no autocast, and no mode of the user's sees them.
class Unseen {
 public:
  Unseen();

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard modes_;
};

}  // namespace penstock::device
