#include "tests/device/simulated/copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>

#include "tests/device/simulated/control.h"
#include "tests/device/simulated/counting.h"
#include "tests/device/simulated/pinned.h"
#include "tests/device/simulated/stream.h"
#include "tests/device/simulated/traffic.h"
#include "tests/device/simulated/view.h"

namespace penstock::sim {
namespace {

// Returns whether the bytes can be copied unchanged and without a temporary.
bool is_plain(const at::Tensor& from, const at::Tensor& to) {
  return from.dtype() == to.dtype() && from.strides() == to.strides() &&
         from.is_non_overlapping_and_dense() && from.is_conj() == to.is_conj() &&
         from.is_neg() == to.is_neg();
}

void transfer(const at::Tensor& from, const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  to.copy_(from);
}

// The two streams wait for each other before and after the copy.
void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  const auto source = current_stream(from.device().index());
  const auto target = current_stream(to.device().index());
  if (source != target) block(source, record(target));
  launch(source, "copy between device tensors",
         [from = View(from), to = View(to)] { transfer(from.on_shadow(), to.on_shadow()); });
  if (source != target) block(target, record(source));
  count_copy(Direction::kDeviceToDevice, to.nbytes(), bytes_touched(from) + bytes_touched(to));
}

std::atomic<bool> pageable_copies_are_late{false};

// Returns whether the host does not wait for a copy from or to `host`.
bool is_late(const at::Tensor& host, bool non_blocking, bool plain) {
  return non_blocking && plain && (pageable_copies_are_late || is_pinned(host.const_data_ptr()));
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto stream = current_stream(to.device().index());
  count_copy(Direction::kHostToDevice, to.nbytes());
  launch(stream, "copy to the device",
         [from = View(from), to = View(to)] { transfer(from.on_host(), to.on_shadow()); });
  if (is_late(from, non_blocking, is_plain(from, to))) {
    pinned_allocator().record_event(from.mutable_data_ptr(), nullptr, stream);
  } else {
    synchronize(stream, "copy_h2d");
  }
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto stream = current_stream(from.device().index());
  count_copy(Direction::kDeviceToHost, from.nbytes());
  launch(stream, "copy to the host",
         [from = View(from), to = View(to)] { transfer(from.on_shadow(), to.on_host()); });
  if (is_late(to, non_blocking, is_plain(from, to))) {
    pinned_allocator().record_event(to.mutable_data_ptr(), nullptr, stream);
  } else {
    synchronize(stream, "copy_d2h");
  }
}

}  // namespace

void set_pageable_copies_are_late(bool late) { pageable_copies_are_late = late; }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (from.sizes() != to.sizes()) return copy_from(from.expand_as(to), to, non_blocking);
  const c10::DeviceGuard guard(on_device(to) ? to.device() : from.device());
  if (on_device(from) && on_device(to)) {
    copy_on_devices(from, to);
  } else if (on_device(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar read_number(const at::Tensor& tensor) {
  const auto stream = current_stream(tensor.device().index());
  at::Scalar number;
  launch(stream, "item", [&number, view = View(tensor)] { number = view.on_shadow().item(); });
  synchronize(stream, "item");
  return number;
}

}  // namespace penstock::sim
