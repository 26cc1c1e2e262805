#pragma once
// Messages: tensors of any shapes, with a text, from one rank to others in order. For what stages
// of a pipeline send each other, whose shapes may change from one micro-batch to the next.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/group.h"
#include "src/comm/channel.h"

namespace penstock::parallel {

struct TensorMessage {
  std::string text;
  std::vector<at::Tensor> tensors;  // CPU; an undefined one arrives as such
};

// One direction. Used by one thread at a time on each side; all sides name the same ranks and
// `lane`, and a message is received under the label that it was sent with. A message of the same
// text, shapes and dtypes as the one before is one exchange beside a fixed small one.
class Messages {
 public:
  Messages(std::shared_ptr<Group> group, int from, const std::vector<int>& to,
           const std::string& lane);

  void set_step(int64_t step) { channel_.set_step(step); }
  void record(std::shared_ptr<trace::Recorder> recorder) {
    channel_.recorder = std::move(recorder);
  }
  // Throws RuntimeFault: a lost peer.
  void send(const comm::Label& label, const TensorMessage& message);
  TensorMessage receive(const comm::Label& label);

 private:
  const std::shared_ptr<Group> group_;
  const Members ends_;
  comm::Channel channel_;
  std::string head_;  // of the message before: its text, shapes and dtypes
};

}  // namespace penstock::parallel
