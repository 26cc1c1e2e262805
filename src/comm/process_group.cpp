// Group over a c10d process group: every collective is made of its point-to-point operations, which
// land in place (gloo's own all-gather copies twice, its reduce-scatter is a full all-reduce).
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/group.h"
#include "src/base/text.h"
#include "src/comm/back_ends.h"
#include "src/comm/lifeline.h"
#include "src/comm/roll_call.h"
#include "src/comm/watch.h"

namespace penstock {
namespace {

// The first exchange waits longer: until then ranks arrive at their own pace, each with its imports
// and connections.
constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);
// When a rank has closed its engine by itself: for what it had a part in to end on the device.
constexpr std::chrono::milliseconds kParting = std::chrono::seconds(2);

class ProcessGroupGroup final : public Group {
 public:
  ProcessGroupGroup(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                    std::chrono::milliseconds timeout,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& downward,
                    std::function<ProcessGroups()> connect, const WatchOptions& watch)
      : process_group_(std::move(process_group)),
        up_(process_group_->getBackend(c10::DeviceType::CPU)),
        down_(downward ? downward->getBackend(c10::DeviceType::CPU) : up_),
        connect_(std::move(connect)),
        limit_(timeout) {
    // A failed exchange, the roll call and its repetition elsewhere together stay within `timeout`.
    const auto grace = std::clamp<std::chrono::milliseconds>(timeout / 8, std::chrono::seconds(1),
                                                             std::chrono::seconds(5));
    timeout_ = std::max(timeout - 2 * grace, timeout / 2);
    roll_call_.emplace(process_group_->getStore(), process_group_->getGroupName(), rank(), size(),
                       grace, [this](const std::string& why) { end_exchanges(why); });
    watch_.emplace(rank(), size(), watch);
  }

  int rank() const override { return up_->getRank(); }
  int size() const override { return up_->getSize(); }

  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag) override {
    try {
      run(sends, receives, tag);
    } catch (const std::exception& error) {  // for the last call
      const std::lock_guard lock(mutex_);
      if (lost_.empty()) lost_ = reason(error);
      throw;
    }
  }

  void set_position(Position position) override { roll_call_->set_position(std::move(position)); }
  std::string roll_call(const std::string& error) override { return roll_call_->call(error); }

  std::string last_call(const std::string& fault) override {
    std::string why = fault;
    if (why.empty()) {
      const std::lock_guard lock(mutex_);
      why = lost_;
    }
    std::string first = "not every rank is there";
    try {
      first = roll_call_->last_call(why, limit_);
    } catch (const std::exception&) {
      end_exchanges(first);
      throw;
    }
    if (!first.empty()) end_exchanges(first);
    return first;
  }

  void end_exchanges(const std::string& why) override {
    {
      const std::lock_guard lock(mutex_);
      if (ended_.empty()) ended_ = why;
      for (const Works* works : waiting_) abort(*works);
    }
    back_ends().abort(why);
  }

  void renew() override {
    lifeline_.reset();
    if (!connect_) throw std::runtime_error("the group was made without a way to connect again");
    const auto [up, down] = connect_();
    up_ = up->getBackend(c10::DeviceType::CPU);
    down_ = down->getBackend(c10::DeviceType::CPU);
    const std::lock_guard lock(mutex_);
    ended_.clear();
    lost_.clear();
  }

  void close() override {
    back_ends().close();
    lifeline_.reset();
    watch_.reset();
    roll_call_.reset();
    up_.reset();
    down_.reset();
    process_group_.reset();
  }

 protected:
  void watch_peers() override {
    if (lifeline_) return;
    const int next = (rank() + 1) % size();
    lifeline_.emplace(next < rank() ? up_ : down_, next,
                      [this](const std::string& error) { neighbour_left(error); });
    back_ends().show_on(watch_->board());
    watch_->look_at([this] { return look_at_device(); });
  }

 private:
  // Lifeline's thread.
  void neighbour_left(const std::string& error) {
    using Ending = comm::RollCall::Ending;
    std::string why;
    const Ending ending = roll_call_->ending(&why);
    if (ending == Ending::kTogether) return;
    if (ending == Ending::kOneByOne) {  // what it has taken part in ends by itself
      const std::lock_guard lock(mutex_);
      left_ = why;
      return;
    }
    why = roll_call_->call(error);
    roll_call_->tell(why);
    end_exchanges(why);
  }

  // Watch's thread.
  std::chrono::milliseconds look_at_device() {
    std::string left;
    {
      const std::lock_guard lock(mutex_);
      left = left_;
    }
    return back_ends().look(left.empty() ? timeout_ : std::min(timeout_, kParting),
                            [&](const std::string& why) {
                              if (!left.empty()) roll_call_->tell(left);
                              end_exchanges(left.empty() ? why : left);
                            });
  }

  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  // Where end_exchanges() finds the works that a thread waits for.
  class Waiting {
   public:
    Waiting(ProcessGroupGroup& group, const Works& works) : group_(group), works_(&works) {
      const std::lock_guard lock(group_.mutex_);
      group_.waiting_.push_back(works_);
      if (!group_.ended_.empty()) abort(*works_);
    }
    ~Waiting() {
      const std::lock_guard lock(group_.mutex_);
      std::erase(group_.waiting_, works_);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    ProcessGroupGroup& group_;
    const Works* works_;
  };

  static void abort(const Works& works) {
    for (const auto& work : works) work->abort();
  }

  std::string ended() {
    const std::lock_guard lock(mutex_);
    return ended_;
  }

  void run(const std::vector<Piece>& sends, const std::vector<Piece>& receives, uint32_t tag) {
    const std::string before = ended();
    if (!before.empty()) throw std::runtime_error(before);
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
    const bool first = !met_.exchange(true);
    const auto limit = first ? std::max(timeout_, kArrival) : timeout_;
    const Waiting waiting(*this, works);
    for (size_t i = 0; i < works.size(); ++i) {
      const size_t num_received = receives.size();
      const Piece& piece = i < num_received ? receives[i] : sends[i - num_received];
      watch_->board().waits_for(tag, piece.peer);
      if (!works[i]->wait(limit)) throw std::runtime_error(ended());
    }
  }

  Board* board() override { return watch_ ? &watch_->board() : nullptr; }

  static at::Tensor wrap(const Piece& piece) {
    return at::from_blob(piece.data, {piece.bytes}, at::TensorOptions().dtype(at::kByte));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  c10::intrusive_ptr<c10d::Backend> up_, down_;  // for what goes to higher and to lower ranks
  const std::function<ProcessGroups()> connect_;
  const std::chrono::milliseconds limit_;  // of the last call
  std::chrono::milliseconds timeout_{};
  std::atomic<bool> met_ = false;
  std::mutex mutex_;
  std::string ended_;                  // guarded by mutex_: why nothing may be exchanged
  std::string lost_;                   // guarded by mutex_: what the first failed exchange said
  std::string left_;                   // guarded by mutex_: why a neighbour's connection is closed
  std::vector<const Works*> waiting_;  // guarded by mutex_
  std::optional<comm::RollCall> roll_call_;
  std::optional<comm::Watch> watch_;
  std::optional<comm::Lifeline> lifeline_;
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
