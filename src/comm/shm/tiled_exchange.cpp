#include "src/comm/shm/tiled_exchange.h"

#include <algorithm>
#include <utility>

namespace penstock::comm {

// The tiles of one exchange, one for each peer, taken from the owner's list of free tiles.
class ShmTiles::TileBuffer {
 public:
  TileBuffer(ShmTiles& owner, size_t count) : owner_(owner) {
    const std::lock_guard lock(owner.mutex_);
    while (tiles_.size() < count) {
      if (owner.free_.empty()) {
        tiles_.push_back(std::make_unique_for_overwrite<char[]>(kTileBytes));
        continue;
      }
      tiles_.push_back(std::move(owner.free_.back()));
      owner.free_.pop_back();
    }
    for (const auto& tile : tiles_) data_.push_back(tile.get());
  }
  ~TileBuffer() {
    const std::lock_guard lock(owner_.mutex_);
    for (auto& tile : tiles_) owner_.free_.push_back(std::move(tile));
  }
  TileBuffer(const TileBuffer&) = delete;
  TileBuffer& operator=(const TileBuffer&) = delete;
  std::span<const void* const> data() const { return data_; }

 private:
  ShmTiles& owner_;
  std::vector<std::unique_ptr<char[]>> tiles_;
  std::vector<const void*> data_;
};

std::vector<Piece> ShmTiles::receives(const TileSource& from) {
  std::vector<Piece> pieces;
  for (const int peer : from.peers) {
    for (const int64_t bytes : from.bytes) pieces.push_back({peer, nullptr, bytes});
  }
  return pieces;
}

void ShmTiles::exchange(ShmExchange& exchange, const TileSource& from, const ShmWait& wait,
                        const TakeTile& take) {
  const TileBuffer tiles(*this, from.peers.size());
  for (size_t piece = 0; piece < from.bytes.size(); ++piece) {
    // `take` runs when the same tile of every peer has been read, so the data is still in the
    // cache.
    for (int64_t offset = 0; offset < from.bytes[piece]; offset += kTileBytes) {
      const int64_t bytes = std::min(kTileBytes, from.bytes[piece] - offset);
      for (size_t i = 0; i < from.peers.size(); ++i) {
        const auto at = reinterpret_cast<uint64_t>(tiles.data()[i]);
        SpanCursor to({{at, static_cast<uint64_t>(bytes)}});
        exchange.read(from.peers[i], to, wait);
      }
      take({piece, offset, bytes, tiles.data()});
    }
  }
  exchange.finish(wait);
}

}  // namespace penstock::comm
