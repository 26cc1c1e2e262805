// Group over a c10d process group: every collective is made of its point-to-point operations, which
// land in place (gloo's own all-gather copies twice, its reduce-scatter is a full all-reduce).
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/group.h"
#include "src/comm/roll_call.h"

namespace penstock {
namespace {

// The first exchange waits longer: until then ranks arrive at their own pace, each with its imports
// and connections.
constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);

class ProcessGroupGroup final : public Group {
 public:
  ProcessGroupGroup(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                    std::chrono::milliseconds timeout)
      : process_group_(std::move(process_group)),
        backend_(process_group_->getBackend(c10::DeviceType::CPU)) {
    // A failed exchange, the roll call and its repetition elsewhere together stay within `timeout`.
    const auto grace = std::clamp<std::chrono::milliseconds>(timeout / 8, std::chrono::seconds(1),
                                                             std::chrono::seconds(5));
    timeout_ = std::max(timeout - 2 * grace, timeout / 2);
    roll_call_.emplace(process_group_->getStore(), process_group_->getGroupName(), rank(), size(),
                       grace);
  }

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }

  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    works.reserve(sends.size() + receives.size());
    for (const Piece& piece : receives) {
      std::vector<at::Tensor> tensors{wrap(piece)};
      works.push_back(backend_->recv(tensors, piece.peer, static_cast<int>(tag)));
    }
    for (const Piece& piece : sends) {
      std::vector<at::Tensor> tensors{wrap(piece)};
      works.push_back(backend_->send(tensors, piece.peer, static_cast<int>(tag)));
    }
    const bool first = !met_.exchange(true);
    const auto limit = first ? std::max(timeout_, kArrival) : timeout_;
    for (const auto& work : works) work->wait(limit);
  }

  void set_position(Position position) override { roll_call_->set_position(std::move(position)); }
  std::string roll_call(const std::string& error) override { return roll_call_->call(error); }

  void close() override {
    roll_call_.reset();
    backend_.reset();
    process_group_.reset();
  }

 private:
  static at::Tensor wrap(const Piece& piece) {
    return at::from_blob(piece.data, {piece.bytes}, at::TensorOptions().dtype(at::kByte));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::chrono::milliseconds timeout_{};
  std::atomic<bool> met_ = false;
  std::optional<comm::RollCall> roll_call_;
};

}  // namespace

std::shared_ptr<Group> Group::from_process_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
    std::chrono::milliseconds timeout) {
  return std::make_shared<ProcessGroupGroup>(process_group, timeout);
}

}  // namespace penstock
