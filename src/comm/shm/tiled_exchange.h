#pragma once
// ShmTiles: runs exchanges over a ShmFabric and gives the received data to a callback, tile by
// tile. Tile buffers are kept for the next exchange, because the first write to newly allocated
// memory takes longer than the copy itself. Usable from any thread.
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "penstock/group.h"
#include "src/comm/shm/exchange.h"

namespace penstock::comm {

class ShmTiles {
 public:
  // See Group::exchange_tiles().
  void exchange(ShmExchange& exchange, const TileSource& from, const ShmWait& wait,
                const TakeTile& take);
  // Returns the receive pieces of an exchange with this source. They have sizes but no memory.
  static std::vector<Piece> receives(const TileSource& from);

 private:
  class TileBuffer;

  std::mutex mutex_;
  std::vector<std::unique_ptr<char[]>> free_;  // guarded by mutex_
};

}  // namespace penstock::comm
