#include <algorithm>
#include <cstring>
#include <numeric>

#include "src/comm/shm/backend.h"

namespace penstock::comm {

namespace {

// An all-reduce of at most this many bytes is one round, in which every rank sends all of its
// values to every other rank.
constexpr int64_t kOneRound = 16 << 10;
constexpr int64_t kPart = 64;  // bytes; the parts of an all-reduce begin at multiples of this
// set in the tags of collectives; the tags of ShmMessages are below it
constexpr uint32_t kOfCollectives = 0x80000000U;

void copy(const ByteRange& from, const ByteRange& to) {
  if (from.bytes > 0 && from.data != to.data) {
    std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes));
  }
}

}  // namespace

uint32_t ShmCollectives::next_tag() { return kOfCollectives | (sequence_++ & ~kOfCollectives); }

void ShmCollectives::exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives) {
  ShmExchange(fabric_, sends, receives, next_tag()).finish({limit_, {}});
}

void ShmCollectives::reduce_tiles(const std::vector<Piece>& sends, const ByteRange& own, void* to,
                                  const Reduction& reduction, int64_t value_bytes) {
  TileSource from;
  from.bytes = {own.bytes};
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) from.peers.push_back(peer);
  }
  std::vector<const void*> sources;
  ShmExchange exchange(fabric_, sends, ShmTiles::receives(from), next_tag());
  tiles_.exchange(exchange, from, {limit_, {}}, [&](const Tile& tile) {
    sources.assign(tile.data.begin(), tile.data.end());
    sources.insert(sources.begin() + rank(), own.data + tile.offset);
    reduction.run(static_cast<char*>(to) + tile.offset, sources, tile.bytes / value_bytes);
  });
}

void ShmCollectives::all_gather(const ByteRange& own, const std::vector<ByteRange>& to) {
  std::vector<Piece> sends, receives;
  for (int peer = 0; peer < size(); ++peer) {
    const ByteRange& part = to[static_cast<size_t>(peer)];
    if (peer == rank()) continue;
    sends.push_back({peer, own.data, own.bytes});
    receives.push_back({peer, part.data, part.bytes});
  }
  ShmExchange exchange(fabric_, sends, receives, next_tag());
  exchange.advance();  // the peers can begin to read
  copy(own, to[static_cast<size_t>(rank())]);
  exchange.finish({limit_, {}});
}

void ShmCollectives::reduce_scatter(const std::vector<ByteRange>& parts, void* to,
                                    const Reduction& reduction, int64_t value_bytes) {
  std::vector<Piece> sends;
  for (int peer = 0; peer < size(); ++peer) {
    const ByteRange& part = parts[static_cast<size_t>(peer)];
    if (peer != rank()) sends.push_back({peer, part.data, part.bytes});
  }
  reduce_tiles(sends, parts[static_cast<size_t>(rank())], to, reduction, value_bytes);
}

void ShmCollectives::all_reduce_small(const ByteRange& values, const Reduction& reduction,
                                      int64_t value_bytes) {
  small_.resize(static_cast<size_t>(values.bytes * size()));
  std::vector<Piece> sends, receives;
  std::vector<const void*> sources;
  for (int peer = 0; peer < size(); ++peer) {
    char* const theirs = small_.data() + peer * values.bytes;
    sources.push_back(peer == rank() ? values.data : theirs);
    if (peer == rank()) continue;
    sends.push_back({peer, values.data, values.bytes});
    receives.push_back({peer, theirs, values.bytes});
  }
  exchange(sends, receives);
  reduction.run(values.data, sources, values.bytes / value_bytes);
}

// In a large all-reduce, each rank reduces its part in place, and then the parts are gathered.
void ShmCollectives::all_reduce(const ByteRange& values, const Reduction& reduction,
                                int64_t value_bytes) {
  if (size() == 1) {
    const void* const own = values.data;
    return reduction.run(values.data, {&own, 1}, values.bytes / value_bytes);
  }
  if (values.bytes <= kOneRound) return all_reduce_small(values, reduction, value_bytes);
  const int64_t unit = std::lcm(kPart, value_bytes);
  const int64_t part = ((values.bytes + size() - 1) / size() + unit - 1) / unit * unit;
  std::vector<ByteRange> parts;
  for (int peer = 0; peer < size(); ++peer) {
    const int64_t begin = std::min(peer * part, values.bytes);
    parts.push_back({values.data + begin, std::min(part, values.bytes - begin)});
  }
  const ByteRange own = parts[static_cast<size_t>(rank())];
  reduce_scatter(parts, own.data, reduction, value_bytes);
  all_gather(own, parts);
}

void ShmCollectives::reduce(const ByteRange& values, const Reduction& reduction,
                            int64_t value_bytes, int root) {
  if (rank() == root) return reduce_tiles({}, values, values.data, reduction, value_bytes);
  exchange({{root, values.data, values.bytes}}, {});
}

// With ShmForm::kSpans the peers copy from the root's memory at the same time.
void ShmCollectives::broadcast(const ByteRange& values, int root) {
  if (rank() != root) return exchange({}, {{root, values.data, values.bytes}});
  std::vector<Piece> sends;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) sends.push_back({peer, values.data, values.bytes});
  }
  exchange(sends, {});
}

void ShmCollectives::all_to_all(const std::vector<ByteRange>& from,
                                const std::vector<ByteRange>& to) {
  std::vector<Piece> sends, receives;
  for (int peer = 0; peer < size(); ++peer) {
    const ByteRange &out = from[static_cast<size_t>(peer)], &in = to[static_cast<size_t>(peer)];
    if (peer == rank()) {
      copy(out, in);
      continue;
    }
    sends.push_back({peer, out.data, out.bytes});
    receives.push_back({peer, in.data, in.bytes});
  }
  exchange(sends, receives);
}

void ShmCollectives::gather(const ByteRange& own, const std::vector<ByteRange>& to, int root) {
  if (rank() != root) return exchange({{root, own.data, own.bytes}}, {});
  std::vector<Piece> receives;
  for (int peer = 0; peer < size(); ++peer) {
    const ByteRange& part = to[static_cast<size_t>(peer)];
    if (peer == root) {
      copy(own, part);
    } else {
      receives.push_back({peer, part.data, part.bytes});
    }
  }
  exchange({}, receives);
}

void ShmCollectives::scatter(const std::vector<ByteRange>& from, const ByteRange& to, int root) {
  if (rank() != root) return exchange({}, {{root, to.data, to.bytes}});
  std::vector<Piece> sends;
  for (int peer = 0; peer < size(); ++peer) {
    const ByteRange& part = from[static_cast<size_t>(peer)];
    if (peer == root) {
      copy(part, to);
    } else {
      sends.push_back({peer, part.data, part.bytes});
    }
  }
  exchange(sends, {});
}

void ShmCollectives::barrier() {
  std::vector<Piece> all;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) all.push_back({peer, nullptr, 0});
  }
  exchange(all, all);
}

}  // namespace penstock::comm
