// The hooks that ATen calls for the device, and the device's name.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DeviceType.h>

#include <algorithm>
#include <cstring>

#include "tests/device/simulated/allocator.h"
#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/control.h"
#include "tests/device/simulated/counting.h"
#include "tests/device/simulated/generator.h"
#include "tests/device/simulated/pinned.h"
#include "tests/device/simulated/stream.h"

namespace penstock::sim {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !is_forked(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return index_of(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return index_of(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return index_of(exchange_device(device));
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    const int device = device_of(pointer);
    TORCH_CHECK(device >= 0, "[sim] not a device pointer: ", pointer);
    return sim_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  // Implements storage.resize_().
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = device_allocator().allocate(bytes);
    if (bytes > 0) count_temporary(bytes);
    const size_t kept = storage.data() ? std::min(storage.nbytes(), bytes) : 0;
    if (kept > 0) {
      launch(current_stream(), "resize_", [to = data.get(), from = storage.data(), kept] {
        std::memcpy(shadow(to), shadow(from), kept);
      });
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }

 private:
  static c10::DeviceIndex index_of(int device) { return static_cast<c10::DeviceIndex>(device); }
};

const bool hooks_registered = [] {
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace penstock::sim
