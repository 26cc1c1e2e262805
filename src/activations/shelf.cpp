#include "src/activations/shelf.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/accumulate.h>

#include <exception>
#include <utility>

namespace penstock::activations {

Shelf::Shelf(Tier tier, const device::Device& computes)
    : tier_(tier),
      device_(computes),
      stream_(computes.is_host() ? std::nullopt : std::optional(computes.side_stream())),
      pool_(computes.is_host() ? mem::MemoryKind::kHost : mem::MemoryKind::kPinned, device_) {}

void Shelf::open_disk(const mem::DiskOptions& options) {
  extents_ = std::make_shared<mem::Extents>(options);
}

void Shelf::close() {
  arena_.trim();
  extents_.reset();
}

at::Tensor Shelf::empty(at::IntArrayRef sizes, at::ScalarType type) {
  const at::TensorOptions options = at::TensorOptions(type).device(device_.where());
  if (!device_.is_host()) return at::empty(sizes, options);
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(type));
  const auto lease = std::make_shared<mem::Lease>(arena_.take(bytes, mem::Account::kAct));
  void* const data = lease->data().host();
  return at::from_blob(
      data, sizes, [lease, self = shared_from_this()](void*) mutable { lease->reset(); }, options);
}

int64_t Shelf::peak_bytes() const { return arena_.usage().total_peak; }

int64_t Shelf::disk_bytes() const { return extents_ ? extents_->disk().reserved() : 0; }

int64_t Shelf::live_bytes() const {
  return arena_.usage().total_now + (extents_ ? extents_->bytes_in_use() : 0);
}

// Copies on the shelf's stream, after the work that this thread has queued. The event marks the end
// of the copy.
device::StreamEvent Shelf::copy(const at::Tensor& to, const at::Tensor& from) const {
  const device::StreamEvent before(device_.current());
  const c10::StreamGuard guard(*stream_);
  before.block(*stream_);
  to.copy_(from, /*non_blocking=*/true);
  device_.used_on((to.is_cpu() ? from : to).storage().data_ptr(), *stream_);
  return device::StreamEvent(*stream_);
}

Parked::Parked(std::shared_ptr<Shelf> shelf, const at::Tensor& values)
    : shelf_(std::move(shelf)),
      dtype_(values.scalar_type()),
      numel_(values.numel()),
      bytes_(numel_ * values.element_size()) {
  const at::NoGradGuard no_grad;
  memory_ = shelf_->arena_.take(bytes_, mem::Account::kAct);
  if (shelf_->tier_ == Tier::kDisk) {
    extents_ = shelf_->extents_;
    offset_ = extents_->take(bytes_);
  }
  try {
    if (shelf_->stream_) {
      copied_.emplace(shelf_->copy(content(), values));
    } else {
      content().copy_(values);
      write();
    }
  } catch (...) {
    if (offset_ >= 0) extents_->give_back(offset_, bytes_);
    throw;
  }
}

Parked::~Parked() {
  try {
    arrive();
  } catch (const std::exception&) {
    // The error can be ignored, because nothing needs the bytes any more. Whether the transfer has
    // ended is checked below: if the device failed, every wait throws.
  }
  back_.reset();
  // The stream must wait for the copies before the memory is given back.
  if (copied_) copied_->block(shelf_->device_.current());
  if (came_) came_->block(shelf_->device_.current());
  if (offset_ >= 0 && !extents_->disk().done(moving_)) {
    // The system may still write to this memory or to this part of the file, so neither is reused.
    if (memory_) shelf_->arena_.keep(memory_.data().data);
    offset_ = -1;
  }
  memory_.reset();
  if (offset_ >= 0) extents_->give_back(offset_, bytes_);
}

void Parked::bring() {
  wanted_ = true;
  if (offset_ < 0) copy_back();  // the values are in host memory or being copied there
  if (memory_ || offset_ < 0) return;
  memory_ = shelf_->arena_.take(bytes_, mem::Account::kAct);
  moving_ = extents_->disk().read(offset_, memory_.data().host(), bytes_);
}

at::Tensor Parked::values() {
  bring();
  arrive();
  copy_back();
  if (came_) came_->block(shelf_->device_.current());
  return back_.defined() ? back_ : content();
}

// With a device, starts to copy the values from host memory.
void Parked::copy_back() {
  if (!shelf_->stream_ || back_.defined()) return;
  const at::NoGradGuard no_grad;
  back_ = at::empty({numel_}, at::TensorOptions(dtype_).device(shelf_->device_.where()));
  came_.emplace(shelf_->copy(back_, content()));
}

void Parked::release() {
  if (!wanted_) return;
  arrive();
  // Host memory is given back in the order of this thread's stream.
  if (came_) came_->block(shelf_->device_.current());
  wanted_ = false;
  back_.reset();
  came_.reset();
  if (offset_ >= 0) memory_.reset();
}

bool Parked::settle() {
  if (wanted_ || offset_ < 0) return true;
  if (copied_) {
    leave();
    return false;
  }
  arrive();
  memory_.reset();
  return true;
}

at::Tensor Parked::content() const {
  return at::from_blob(memory_.data().host(), {numel_}, at::TensorOptions(dtype_));
}

void Parked::write() {
  if (offset_ >= 0) moving_ = extents_->disk().write(offset_, memory_.data().host(), bytes_);
}

// Waits until the values are in host memory, then starts the write to the disk.
void Parked::leave() {
  if (!copied_) return;
  copied_->synchronize();
  copied_.reset();
  write();
}

// Waits until the disk transfer in flight has ended.
void Parked::arrive() {
  if (offset_ < 0) return;
  leave();
  extents_->disk().wait(moving_);
  moving_ = {};
}

}  // namespace penstock::activations
