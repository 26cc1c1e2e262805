#pragma once
// Random numbers of the device. The kernels on the streams draw from a CPU generator, so a program
// draws the same numbers as on the CPU.
#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include "tests/device/simulated/stream.h"

namespace penstock::sim {

// Used by one host thread at a time, like every generator.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(int device);

  // Returns the CPU generator from which the next kernel on this stream draws. Kernels draw in the
  // order in which they were issued. The caller queues the kernel, and then calls drawn().
  at::Generator for_kernel(c10::Stream stream);
  void drawn(c10::Stream stream);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  // Waits for the kernels that draw; CUDA's generator does not.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;

 private:
  DeviceGenerator* clone_impl() const override;

  at::Generator host_;
  MarkPointer last_;  // after the last kernel that draws
  c10::StreamId last_stream_ = 0;
};

// Device -1 is the current device.
const at::Generator& default_generator(int device = -1);
at::Generator new_generator(int device = -1);

}  // namespace penstock::sim
