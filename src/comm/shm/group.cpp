// Group of ranks on one host, over shared memory ([Note: Shared memory], layout.h).
#include <algorithm>
#include <stdexcept>
#include <utility>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "src/base/text.h"
#include "src/comm/device_backends.h"
#include "src/comm/shm/exchange.h"
#include "src/comm/shm/one_host.h"
#include "src/comm/shm/rendezvous.h"
#include "src/comm/shm/tiled_exchange.h"
#include "src/comm/store_group.h"
#include "src/comm/timeouts.h"

namespace penstock {
namespace {

class ShmGroup final : public comm::StoreGroup {
 public:
  ShmGroup(const c10::intrusive_ptr<c10d::Store>& store, RankOf ranks,
           std::chrono::milliseconds timeout, const WatchOptions& watch,
           std::unique_ptr<comm::ShmFabric> fabric)
      : StoreGroup(store, "ranks", ranks, timeout, watch),
        store_(store),
        arrival_(std::max(timeout, comm::kArrival)) {
    use(std::move(fabric));
  }
  ~ShmGroup() override {
    leave();
    let_go();
  }

  static comm::ShmMeeting meet(const c10::intrusive_ptr<c10d::Store>& store, int generation,
                               RankOf ranks, std::chrono::milliseconds timeout) {
    c10d::PrefixStore own(concat("meeting ", generation), store);
    return comm::meet_in_memory(own, ranks.rank, ranks.size, std::max(timeout, comm::kArrival));
  }

  void renew() override {
    leave();
    comm::ShmMeeting met = meet(store_, ++generation_, {rank(), size()}, arrival_);
    if (!met.fabric) throw std::runtime_error(met.why_not);
    use(std::move(met.fabric));
    forget();
  }

  std::string transport() const override {
    return spans_ ? "shm" : "shm, copied twice: no process may read another's memory here";
  }

  void close() override {
    back_ends().close();
    leave();
    let_go();
    store_.reset();
  }

 protected:
  // The fabric notices the end of every peer's process. It reports only the end of the next rank's
  // process (as ConnectionWatch does for gloo), so that exactly one rank starts the roll call.
  void watch_peers() override {
    fabric_->on_death([this](int peer) {
      if (peer == (rank() + 1) % size())
        neighbour_left(concat("the process of rank ", peer, " has ended"));
    });
    look_at_device();
  }

 private:
  void use(std::unique_ptr<comm::ShmFabric> fabric) {
    spans_ = fabric->spans();
    const std::lock_guard lock(mutex_);
    fabric_ = std::move(fabric);
  }

  // The destructor of the fabric marks this rank as closed. The other ranks notice it.
  void leave() {
    std::unique_ptr<comm::ShmFabric> left;
    const std::lock_guard lock(mutex_);
    left = std::move(fabric_);
  }

  void abort_waits() override {
    if (fabric_) fabric_->end(ended_);
  }

  comm::ShmWait how(uint32_t tag) {
    return {limit(), [this, tag](int peer) { waits_for(tag, peer); }};
  }

  void run(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
           uint32_t tag) override {
    comm::ShmExchange exchange(*fabric_, sends, receives, tag);
    exchange.finish(how(tag));
  }

  bool run_tiles(const std::vector<Piece>& sends, const TileSource& from, uint32_t tag,
                 const TakeTile& take) override {
    const comm::ShmWait wait = how(tag);
    comm::ShmExchange exchange(*fabric_, sends, comm::ShmTiles::receives(from), tag);
    tiles_.exchange(exchange, from, wait, take);
    return true;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds arrival_;
  int generation_ = 0;
  bool spans_ = true;
  std::unique_ptr<comm::ShmFabric> fabric_;  // changed under mutex_, while nothing is exchanged
  comm::ShmTiles tiles_;
};

}  // namespace

std::shared_ptr<Group> group_on_one_host(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, std::chrono::milliseconds timeout,
                                         const WatchOptions& watch, std::string* why_not) {
  comm::ShmMeeting met = ShmGroup::meet(store, 0, {rank, size}, timeout);
  if (!met.fabric) {
    *why_not = met.one_host ? met.why_not : "";
    return nullptr;
  }
  return std::make_shared<ShmGroup>(store, ShmGroup::RankOf{rank, size}, timeout, watch,
                                    std::move(met.fabric));
}

}  // namespace penstock
