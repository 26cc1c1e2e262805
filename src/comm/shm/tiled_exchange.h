#pragma once
// ShmTiles: exchanges over a ShmFabric whose arrivals are handed over tile by tile, in memory that
// is kept for the next one (fresh memory is slower than what goes into it). From any thread.
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "penstock/group.h"
#include "src/comm/shm/exchange.h"

namespace penstock::comm {

class ShmTiles {
 public:
  // As Group::exchange_tiles().
  void exchange(ShmExchange& exchange, const TileSource& from, const ShmWait& wait,
                const TakeTile& take);
  // What is to be received for that.
  static std::vector<Piece> receives(const TileSource& from);

 private:
  class TileBuffer;

  std::mutex mutex_;
  std::vector<std::unique_ptr<char[]>> free_;  // guarded by mutex_
};

}  // namespace penstock::comm
