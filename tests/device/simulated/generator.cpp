#include "tests/device/simulated/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/control.h"

namespace penstock::sim {

DeviceGenerator::DeviceGenerator(int device)
    : c10::GeneratorImpl(sim_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host_(at::detail::createCPUGenerator()) {}

at::Generator DeviceGenerator::for_kernel(c10::Stream stream) {
  if (last_ && last_stream_ != stream.id()) block(stream, last_);
  return host_;
}

void DeviceGenerator::drawn(c10::Stream stream) {
  last_ = record(stream);
  last_stream_ = stream.id();
}

// Makes a new generator, because queued work still draws from the old one.
void DeviceGenerator::set_current_seed(uint64_t seed) {
  host_ = at::detail::createCPUGenerator(seed);
}

uint64_t DeviceGenerator::current_seed() const { return host_.current_seed(); }

uint64_t DeviceGenerator::seed() {
  host_ = at::detail::createCPUGenerator();
  return host_.seed();
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  host_ = at::detail::createCPUGenerator();
  host_.unsafeGetGeneratorImpl()->set_state(state);
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  if (last_) synchronize(device().index(), last_, "generator");
  return host_.unsafeGetGeneratorImpl()->get_state();
}

void DeviceGenerator::set_offset(uint64_t offset) {
  host_.unsafeGetGeneratorImpl()->set_offset(offset);
}

uint64_t DeviceGenerator::get_offset() const {
  return host_.unsafeGetGeneratorImpl()->get_offset();
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto copy = std::make_unique<DeviceGenerator>(device().index());
  copy->set_state(*get_state());
  return copy.release();
}

const at::Generator& default_generator(int device) {
  static const auto* const generators = [] {
    auto* created = new std::vector<at::Generator>;
    for (int index = 0; index < kDevices; ++index) created->push_back(new_generator(index));
    return created;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

}  // namespace penstock::sim
