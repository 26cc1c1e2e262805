#include "src/parallel/tensor_messages.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "src/base/text.h"

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
    writer.put(tensor.dim());
    for (const int64_t size : tensor.sizes()) writer.put(size);
  }
  return std::move(writer).take();
}

// Allocates the tensors of a message, whose values are received later.
TensorMessage message_of(const std::string& head) {
  MessageReader reader(head);
  TensorMessage message;
  message.text = reader.text();
  message.tensors.resize(static_cast<size_t>(reader.number()));
  for (at::Tensor& tensor : message.tensors) {
    const int64_t type = reader.number();
    if (type == kUndefined) continue;
    std::vector<int64_t> sizes(static_cast<size_t>(reader.number()));
    for (int64_t& size : sizes) size = reader.number();
    tensor = at::empty(sizes, at::TensorOptions(static_cast<at::ScalarType>(type)));
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
                   const std::string& lane)
    : group_(std::move(group)),
      ends_(ends_of(from, to, group_->rank())),
      channel_(*group_, lane, concat(ends_.index == 0 ? "send, " : "receive, ", lane)) {}

// A small fixed-size exchange first sends the header's length, or 0 if the header equals the
// previous one. The header and each tensor are sent after that.
void Messages::send(const comm::Label& label, const TensorMessage& message) {
  const std::string head = head_of(message);
  const bool again = head == head_;
  auto length = static_cast<int64_t>(again ? 0 : head.size());
  channel_.broadcast(label, ends_, &length, sizeof(length));
  if (!again) {
    head_ = head;
    channel_.broadcast(label, ends_, head_.data(), length);
  }
  // Contiguous tensors, held until all of them are sent. Empty ones have no bytes to send.
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : message.tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    held.push_back(tensor.resolve_conj().resolve_neg().contiguous());
  }
  for (const at::Tensor& tensor : held) {
    channel_.broadcast(label, ends_, tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  }
}

TensorMessage Messages::receive(const comm::Label& label) {
  int64_t length = 0;
  channel_.broadcast(label, ends_, &length, sizeof(length));
  if (length > 0) {
    head_.assign(static_cast<size_t>(length), '\0');
    channel_.broadcast(label, ends_, head_.data(), length);
  }
  TensorMessage message = message_of(head_);
  for (const at::Tensor& tensor : message.tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    channel_.broadcast(label, ends_, tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  }
  return message;
}

}  // namespace penstock::parallel
