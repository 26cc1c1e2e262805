// Group over a c10d process group. Every collective consists of the process group's point-to-point
// operations, which receive in place. In contrast, gloo's own all-gather copies twice, and its
// reduce-scatter is a full all-reduce.
#include <ATen/ops/from_blob.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "src/comm/connection_watch.h"
#include "src/comm/device_backends.h"
#include "src/comm/store_group.h"

namespace penstock {
namespace {

class ProcessGroupGroup final : public comm::StoreGroup {
 public:
  ProcessGroupGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
                    std::chrono::milliseconds timeout,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& downward,
                    std::function<ProcessGroups()> connect, const WatchOptions& watch)
      : StoreGroup(process_group->getStore(), process_group->getGroupName(),
                   {process_group->getRank(), process_group->getSize()}, timeout, watch),
        process_group_(process_group),
        connect_(std::move(connect)) {
    use(process_group, downward ? downward : process_group);
  }
  ~ProcessGroupGroup() override {
    lifeline_.reset();
    let_go();
  }

  void renew() override {
    lifeline_.reset();
    if (!connect_)
      throw std::runtime_error("the group cannot connect again: it was made without `connect`");
    const auto [up, down] = connect_();
    use(up, down);
    forget();
  }

  std::string transport() const override { return "gloo"; }

  void close() override {
    back_ends().close();
    lifeline_.reset();
    let_go();
    up_.reset();
    down_.reset();
    process_group_.reset();
  }

 protected:
  // Each rank watches its next rank, so every rank is watched by exactly one other rank.
  void watch_peers() override {
    if (lifeline_) return;
    const int next = (rank() + 1) % size();
    lifeline_.emplace(next < rank() ? up_ : down_, next,
                      [this](const std::string& error) { neighbour_left(error); });
    look_at_device();
  }

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  void use(const c10::intrusive_ptr<c10d::ProcessGroup>& up,
           const c10::intrusive_ptr<c10d::ProcessGroup>& down) {
    up_ = up->getBackend(c10::DeviceType::CPU);
    down_ = down->getBackend(c10::DeviceType::CPU);
  }

  // Registers the c10d works that a thread waits for, so that end_exchanges() can abort them.
  class WaitNotice {
   public:
    WaitNotice(ProcessGroupGroup& group, const Works& works) : group_(group), works_(&works) {
      const std::lock_guard lock(group_.mutex_);
      group_.waiting_.push_back(works_);
      if (!group_.ended_.empty()) abort(*works_);
    }
    ~WaitNotice() {
      const std::lock_guard lock(group_.mutex_);
      std::erase(group_.waiting_, works_);
    }
    WaitNotice(const WaitNotice&) = delete;
    WaitNotice& operator=(const WaitNotice&) = delete;

   private:
    ProcessGroupGroup& group_;
    const Works* works_;
  };

  static void abort(const Works& works) {
    for (const auto& work : works) work->abort();
  }

  void abort_waits() override {
    for (const Works* works : waiting_) abort(*works);
  }

  void run(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
           uint32_t tag) override {
    Works works;
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
    const auto within = limit();
    const WaitNotice waiting(*this, works);
    for (size_t i = 0; i < works.size(); ++i) {
      const size_t num_received = receives.size();
      const Piece& piece = i < num_received ? receives[i] : sends[i - num_received];
      waits_for(tag, piece.peer);
      if (!works[i]->wait(within)) throw std::runtime_error(ended());
    }
  }

  // gloo gives no access to a part of a message.
  bool run_tiles(const std::vector<Piece>& /*sends*/, const TileSource& /*from*/, uint32_t /*tag*/,
                 const TakeTile& /*take*/) override {
    return false;
  }

  static at::Tensor wrap(const Piece& piece) {
    return at::from_blob(piece.data, {piece.bytes}, at::TensorOptions().dtype(at::kByte));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  c10::intrusive_ptr<c10d::Backend> up_, down_;  // for sends to higher ranks and to lower ranks
  const std::function<ProcessGroups()> connect_;
  std::vector<const Works*> waiting_;  // guarded by mutex_
  std::optional<comm::ConnectionWatch> lifeline_;
};

}  // namespace

std::shared_ptr<Group> Group::from_process_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group, std::chrono::milliseconds timeout,
    const c10::intrusive_ptr<c10d::ProcessGroup>& downward, std::function<ProcessGroups()> connect,
    const WatchOptions& watch) {
  return std::make_shared<ProcessGroupGroup>(process_group, timeout, downward, std::move(connect),
                                             watch);
}

}  // namespace penstock
