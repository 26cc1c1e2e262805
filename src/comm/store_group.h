#pragma once
// StoreGroup: base class of the groups whose ranks are processes that meet at a store. It
// implements roll_call(), last_call(), board() and end_exchanges(). A subclass implements the
// exchanges.
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/group.h"
#include "src/comm/lost_ranks.h"
#include "src/comm/watchdog.h"

namespace penstock::comm {

class StoreGroup : public Group {
 public:
  struct RankOf {
    int rank = 0, size = 1;
  };
  int rank() const final { return rank_; }
  int size() const final { return size_; }
  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag) final;
  bool exchange_tiles(const std::vector<Piece>& sends, const TileSource& from, uint32_t tag,
                      const TakeTile& take) final;
  void set_position(Position position) final { roll_call_->set_position(std::move(position)); }
  std::string roll_call(const std::string& error) final { return roll_call_->call(error); }
  Board* board() final { return watch_ ? &watch_->board() : nullptr; }
  std::string last_call(const std::string& fault) final;
  void end_exchanges(const std::string& why) final;

 protected:
  // `name` must be unique to this group in the store. The watch thread may call abort_waits() as
  // soon as this constructor runs.
  StoreGroup(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, RankOf ranks,
             std::chrono::milliseconds timeout, const WatchOptions& watch);

  // ---- implemented by the subclass; run() and run_tiles() throw when a peer is lost
  virtual void run(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                   uint32_t tag) = 0;
  virtual bool run_tiles(const std::vector<Piece>& sends, const TileSource& from, uint32_t tag,
                         const TakeTile& take) = 0;
  // Ends the waits in progress. Called with mutex_ locked, after ended_ is set.
  virtual void abort_waits() = 0;

  std::chrono::milliseconds time_to_connect() override { return limit(); }
  // Returns the time limit of the calling exchange. The first exchange gets at least kArrival.
  std::chrono::milliseconds limit();
  void waits_for(uint32_t tag, int peer) { watch_->board().waits_for(tag, peer); }
  std::string ended();
  // Makes the watchdog also watch collectives on the device. No exchange on the host waits for
  // these collectives.
  void look_at_device();
  void neighbour_left(const std::string& error);
  // Clears the reasons why exchanges were ended. Called by renew().
  void forget();
  // Ends the threads that call into the subclass. A subclass calls it in its destructor and in
  // close().
  void let_go();

  std::mutex mutex_;
  std::string ended_;  // guarded by mutex_: why exchanges were ended; "": they were not

 private:
  template <class Run>
  auto keeping_fault(const Run& run);
  std::chrono::milliseconds look();
  std::chrono::milliseconds ask(Board& board);
  std::string answer(const std::string& question);

  const int rank_, size_;
  const std::chrono::milliseconds limit_;  // time limit of last_call()
  std::chrono::milliseconds timeout_{};
  std::atomic<bool> met_ = false;
  std::string lost_;  // guarded by mutex_: the error of the first failed exchange
  std::string left_;  // guarded by mutex_: why a neighbour's connection was closed
  // For each lane, the age of its wait in seconds when ask() last asked about it.
  std::map<std::string, double> asked_;
  std::mutex answers_;
  bool answers_questions_ = false;  // guarded by answers_
  // For each rank and lane that asked, the last difference found. Guarded by answers_.
  std::map<std::pair<int, std::string>, std::string> suspected_;
  std::optional<LostRanks> roll_call_;
  std::optional<Watchdog> watch_;
};

}  // namespace penstock::comm
