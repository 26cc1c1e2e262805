#include "src/device/device.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace penstock::device {

namespace {

c10::Device with_index(c10::Device where) {
  if (where.is_cpu() || where.has_index()) return where;
  return c10::impl::VirtualGuardImpl(where.type()).getDevice();
}

// Returns the dispatch keys of the user's modes. They are excluded so that the modes do not see the
// engine's operations.
c10::DispatchKeySet modes() {
  return c10::autocast_dispatch_keyset |
         c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                              c10::DispatchKey::DeferredInit});
}

}  // namespace

Device::Device(c10::Device where) : where_(with_index(where)) {
  if (!is_host()) at::globalContext().lazyInitDevice(where_.type());
}

const Device& Device::host() {
  static const Device kHost{c10::Device(c10::DeviceType::CPU)};
  return kHost;
}

c10::Stream Device::current() const {
  return c10::impl::VirtualGuardImpl(where_.type()).getStream(where_);
}

c10::Stream Device::side_stream() const {
  return c10::impl::VirtualGuardImpl(where_.type())
      .getStreamFromGlobalPool(where_, /*isHighPriority=*/true);
}

void Device::make_current() const {
  if (!is_host()) c10::impl::VirtualGuardImpl(where_.type()).setDevice(where_);
}

c10::DataPtr Device::allocate(int64_t bytes) const {
  const c10::DeviceGuard guard(where_);
  return c10::GetAllocator(where_.type())->allocate(static_cast<size_t>(bytes));
}

c10::DataPtr Device::allocate_pinned(int64_t bytes) const {
  return at::getHostAllocator(where_.type())->allocate(static_cast<size_t>(bytes));
}

void Device::give_back_pinned(c10::DataPtr memory) const {
  at::getHostAllocator(where_.type())->record_event(memory.get(), memory.get_context(), current());
}

void Device::used_on(const c10::DataPtr& memory, const c10::Stream& stream) const {
  c10::impl::VirtualGuardImpl(where_.type()).recordDataPtrOnStream(memory, stream);
}

// Torch's caching allocator keeps memory that tensors have freed, so these bytes are also free.
std::optional<int64_t> Device::free_bytes() const {
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(where_.type()));
  if (allocator == nullptr) return std::nullopt;
  try {
    const auto [free, total] = allocator->getMemoryInfo(where_.index());
    const c10::CachingDeviceAllocator::DeviceStats stats =
        allocator->getDeviceStats(where_.index());
    constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const int64_t kept = stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current;
    return static_cast<int64_t>(free) + std::max<int64_t>(0, kept);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

void Device::synchronize() const { current().synchronize(); }

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp32:
      return at::kFloat;
    case Dtype::kBf16:
      return at::kBFloat16;
    case Dtype::kFp16:
      return at::kHalf;
    case Dtype::kInt8:
    case Dtype::kInt4:
      break;
  }
  throw Bug("[device::scalar_type] torch has no type for quantized values");
}

std::optional<Dtype> find_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Dtype::kFp32;
    case at::kBFloat16:
      return Dtype::kBf16;
    case at::kHalf:
      return Dtype::kFp16;
    default:
      return std::nullopt;
  }
}

at::Tensor view(Address at, at::ScalarType type, int64_t numel) {
  const c10::Device where =
      at.device == nullptr ? c10::Device(c10::DeviceType::CPU) : at.device->where();
  const auto options = at::TensorOptions(type).device(where);
  // An empty range may have a null address.
  if (numel == 0) return at::empty({0}, options);
  return at::for_blob(at.data, {numel}).options(options).target_device(where).make_tensor();
}

at::Tensor view(Address at, Dtype dtype, int64_t numel) {
  return view(at, scalar_type(dtype), numel);
}

Unseen::Unseen() : modes_(modes()) {}

}  // namespace penstock::device
