#pragma once
// Messages: sends tensors of any shapes, with a text, from one rank to others, in order. Pipeline
// stages use it, because the shapes of their tensors may change between micro-batches.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/device/device.h"

namespace penstock::parallel {

struct TensorMessage {
  std::string text;
  // On the CPU or on the device where the ranks compute. An undefined tensor stays undefined.
  std::vector<at::Tensor> tensors;
};

// Carries messages in one direction. Used by one thread at a time on each side. All ranks must
// pass the same `from`, `to` and `lane`. A message must be received under the label with which it
// was sent. If text, shapes and dtypes equal those of the previous message, they are not sent
// again.
//
// Tensors on a device are sent and received by work that is queued on the calling thread's stream.
class Messages {
 public:
  // [from and to] Connects the ranks for tensors on the device `computes`, which must outlive this
  // object. Throws RuntimeFault if they cannot be connected.
  Messages(std::shared_ptr<Group> group, int from, const std::vector<int>& to,
           const std::string& lane, const device::Device& computes = device::Device::host());

  void set_step(int64_t step) { channel_.set_step(step); }
  void record(std::shared_ptr<trace::Recorder> recorder) {
    channel_.recorder = std::move(recorder);
  }
  // Throws RuntimeFault if a peer is lost.
  void send(const comm::Label& label, const TensorMessage& message);
  TensorMessage receive(const comm::Label& label);

 private:
  void transfer(const comm::Label& label, const at::Tensor& values);

  const std::shared_ptr<Group> group_;
  const Members ends_;
  const device::Device& computes_;
  comm::Channel channel_;
  std::string head_;  // text, shapes and dtypes of the previous message
};

}  // namespace penstock::parallel
