#include "src/parallel/tensor_messages.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

#include "src/base/text.h"
#include "src/device/kernels.h"

namespace penstock::parallel {

namespace {

// Serializes numbers and texts one after another.
class MessageWriter {
 public:
  void put(int64_t number) { text_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  void put(const std::string& text) {
    put(static_cast<int64_t>(text.size()));
    text_ += text;
  }
  std::string take() && { return std::move(text_); }

 private:
  std::string text_;
};

class MessageReader {
 public:
  explicit MessageReader(const std::string& text) : text_(text) {}
  int64_t number() {
    int64_t number = 0;
    std::memcpy(&number, text_.data() + at_, sizeof(number));
    at_ += sizeof(number);
    return number;
  }
  std::string text() {
    const auto size = static_cast<size_t>(number());
    std::string read = text_.substr(at_, size);
    at_ += size;
    return read;
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

constexpr int64_t kUndefined = -1;

std::string head_of(const TensorMessage& message) {
  MessageWriter writer;
  writer.put(message.text);
  writer.put(static_cast<int64_t>(message.tensors.size()));
  for (const at::Tensor& tensor : message.tensors) {
    writer.put(tensor.defined() ? static_cast<int64_t>(tensor.scalar_type()) : kUndefined);
    if (!tensor.defined()) continue;
    writer.put(tensor.is_cpu() ? 1 : 0);
    writer.put(tensor.dim());
    for (const int64_t size : tensor.sizes()) writer.put(size);
  }
  return std::move(writer).take();
}

// Allocates the tensors of a message, whose values are received later.
TensorMessage message_of(const std::string& head, const device::Device& computes) {
  MessageReader reader(head);
  TensorMessage message;
  message.text = reader.text();
  message.tensors.resize(static_cast<size_t>(reader.number()));
  for (at::Tensor& tensor : message.tensors) {
    const int64_t type = reader.number();
    if (type == kUndefined) continue;
    const c10::Device where = reader.number() == 1 ? c10::Device(at::kCPU) : computes.where();
    std::vector<int64_t> sizes(static_cast<size_t>(reader.number()));
    for (int64_t& size : sizes) size = reader.number();
    tensor = at::empty(sizes, at::device(where).dtype(static_cast<at::ScalarType>(type)));
  }
  return message;
}

// The sender is member 0, whose bytes Channel::broadcast() sends.
Members ends_of(int from, const std::vector<int>& to, int rank) {
  Members ends{{from}, 0};
  for (const int one : to) {
    if (one == rank) ends.index = ends.size();
    ends.ranks.push_back(one);
  }
  return ends;
}

}  // namespace

Messages::Messages(std::shared_ptr<Group> group, int from, const std::vector<int>& to,
                   const std::string& lane, const device::Device& computes)
    : group_(std::move(group)),
      ends_(ends_of(from, to, group_->rank())),
      computes_(computes),
      channel_(*group_, lane, concat(ends_.index == 0 ? "send, " : "receive, ", lane)) {
  if (computes.is_host() || !group_->device_groups()) return;
  channel_.use(ends_, group_->connect_on_device(ends_.ranks, computes.where()));
}

void Messages::transfer(const comm::Label& label, const at::Tensor& values) {
  channel_.broadcast(label, ends_, device::address_of(values, &computes_),
                     static_cast<int64_t>(values.nbytes()));
  // The memory may belong to another thread's stream, and this thread's stream still uses it.
  if (!values.is_cpu()) computes_.used_on(values.storage().data_ptr(), computes_.current());
}

// A small fixed-size exchange first sends the header's length, or 0 if the header equals the
// previous one. The header and each tensor are sent after that.
void Messages::send(const comm::Label& label, const TensorMessage& message) {
  // Contiguous tensors, held until all of them are sent. Empty ones have no bytes to send.
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : message.tensors) {
    if (!tensor.defined()) continue;
    TORCH_CHECK(tensor.is_cpu() || tensor.device() == computes_.where(),
                "[parallel::Messages] the engine computes on ", computes_.where(),
                ", but a stage's values are on ", tensor.device());
    if (tensor.numel() > 0) held.push_back(tensor.resolve_conj().resolve_neg().contiguous());
  }
  const std::string head = head_of(message);
  const bool again = head == head_;
  auto length = static_cast<int64_t>(again ? 0 : head.size());
  channel_.broadcast(label, ends_, &length, sizeof(length));
  if (!again) {
    head_ = head;
    channel_.broadcast(label, ends_, head_.data(), length);
  }
  for (const at::Tensor& tensor : held) transfer(label, tensor);
}

TensorMessage Messages::receive(const comm::Label& label) {
  int64_t length = 0;
  channel_.broadcast(label, ends_, &length, sizeof(length));
  if (length > 0) {
    head_.assign(static_cast<size_t>(length), '\0');
    channel_.broadcast(label, ends_, head_.data(), length);
  }
  TensorMessage message = message_of(head_, computes_);
  for (const at::Tensor& tensor : message.tensors) {
    if (tensor.defined() && tensor.numel() > 0) transfer(label, tensor);
  }
  return message;
}

}  // namespace penstock::parallel
