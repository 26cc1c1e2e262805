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
#include "src/comm/watch.h"

namespace penstock {
namespace {

// The first exchange waits longer: until then ranks arrive at their own pace, each with its imports
// and connections.
constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);

class ProcessGroupGroup final : public Group {
 public:
  ProcessGroupGroup(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                    std::chrono::milliseconds timeout,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& downward,
                    const WatchOptions& watch)
      : process_group_(std::move(process_group)),
        up_(process_group_->getBackend(c10::DeviceType::CPU)),
        down_(downward ? downward->getBackend(c10::DeviceType::CPU) : up_) {
    // A failed exchange, the roll call and its repetition elsewhere together stay within `timeout`.
    const auto grace = std::clamp<std::chrono::milliseconds>(timeout / 8, std::chrono::seconds(1),
                                                             std::chrono::seconds(5));
    timeout_ = std::max(timeout - 2 * grace, timeout / 2);
    roll_call_.emplace(process_group_->getStore(), process_group_->getGroupName(), rank(), size(),
                       grace);
    watch_.emplace(rank(), size(), watch);
  }

  int rank() const override { return up_->getRank(); }
  int size() const override { return up_->getSize(); }

  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    works.reserve(sends.size() + receives.size());
    for (const Piece& piece : receives) {
      std::vector<at::Tensor> tensors{wrap(piece)};
      c10d::Backend& backend = piece.peer < rank() ? *up_ : *down_;
      works.push_back(backend.recv(tensors, piece.peer, static_cast<int>(tag)));
    }
    for (const Piece& piece : sends) {
      std::vector<at::Tensor> tensors{wrap(piece)};
      c10d::Backend& backend = piece.peer > rank() ? *up_ : *down_;
      works.push_back(backend.send(tensors, piece.peer, static_cast<int>(tag)));
    }
    const bool first = !met_.exchange(true);
    const auto limit = first ? std::max(timeout_, kArrival) : timeout_;
    for (size_t i = 0; i < works.size(); ++i) {
      const size_t num_received = receives.size();
      const Piece& piece = i < num_received ? receives[i] : sends[i - num_received];
      watch_->board().waits_for(tag, piece.peer);
      works[i]->wait(limit);
    }
  }

  void set_position(Position position) override { roll_call_->set_position(std::move(position)); }
  std::string roll_call(const std::string& error) override { return roll_call_->call(error); }

  Board* board() override { return watch_ ? &watch_->board() : nullptr; }

  void close() override {
    watch_.reset();
    roll_call_.reset();
    up_.reset();
    down_.reset();
    process_group_.reset();
  }

 private:
  static at::Tensor wrap(const Piece& piece) {
    return at::from_blob(piece.data, {piece.bytes}, at::TensorOptions().dtype(at::kByte));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  c10::intrusive_ptr<c10d::Backend> up_, down_;  // for what goes to higher and to lower ranks
  std::chrono::milliseconds timeout_{};
  std::atomic<bool> met_ = false;
  std::optional<comm::RollCall> roll_call_;
  std::optional<comm::Watch> watch_;
};

}  // namespace

std::shared_ptr<Group> Group::from_process_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group, std::chrono::milliseconds timeout,
    const c10::intrusive_ptr<c10d::ProcessGroup>& downward, const WatchOptions& watch) {
  return std::make_shared<ProcessGroupGroup>(process_group, timeout, downward, watch);
}

}  // namespace penstock
