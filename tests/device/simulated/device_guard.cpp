// The functions that c10's generic Device, Stream and Event guards call for this device.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include "tests/device/simulated/allocator.h"
#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/control.h"
#include "tests/device/simulated/counting.h"
#include "tests/device/simulated/stream.h"

namespace penstock::sim {
namespace {

// The object that a c10::Event points to.
struct Recorded {
  MarkPointer mark;
  int device = 0;
};

Recorded& recorded(void* event) { return *static_cast<Recorded*>(event); }

class DevicesAndStreams : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return sim_device(exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return sim_device(current_device()); }
  // Unlike CUDA's, makes no context, because each device's autograd thread calls it at its start.
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device, "device");
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return pool_stream(device.index(), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(device.index(), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(c10::Stream stream) const override { return native_handle(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream, "stream");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }
};

// After the device has failed, every use of an event throws.
class Guard final : public DevicesAndStreams {
 public:
  // Every event records its time, so the flag does not matter.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "[sim] an event of device ",
                int{device}, " cannot be recorded on a stream of device ",
                int{stream.device_index()});
    visit_device(stream.device_index());
    throw_if_failed(stream.device_index());
    if (!*event) {
      *event = new Recorded;
      count_new_event();
    }
    recorded(*event) = {sim::record(stream), stream.device_index()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    visit_device(stream.device_index());
    throw_if_failed(stream.device_index());
    if (event) sim::block(stream, recorded(event).mark);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    throw_if_failed(recorded(event).device);
    return is_done(recorded(event).mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(recorded(event).device, recorded(event).mark, "event");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr) visit_device(recorded(event).device);
    delete static_cast<Recorded*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "[sim] both events must be recorded");
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "[sim] both events must be done");
    const auto time = recorded(second).mark->time - recorded(first).mark->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace penstock::sim
