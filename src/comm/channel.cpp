#include "src/comm/channel.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/comm/connection_watch.h"
#include "src/device/device.h"
#include "src/device/kernels.h"
#include "src/place/packing.h"
#include "src/trace/chrome.h"

namespace penstock::comm {

using device::Address;

namespace {

RuntimeFault lost_peer(Group& group, const trace::Recorder* recorder, const Position& position,
                       const std::string& error) {
  Board* const board = group.board();
  const std::string verdict = is_difference(error) ? error : group.roll_call(error);
  const std::string text = is_difference(verdict)
                               ? verdict
                               : concat("[comm::exchange] rank ", group.rank(), " lost a peer at ",
                                        position.text(), ": ", verdict);
  return RuntimeFault(concat(text, board == nullptr ? "" : board->report(text),
                             recorder == nullptr ? "" : trace::dump(*recorder)));
}

uint64_t mix(uint64_t hash, uint64_t value) {
  return hash_text({reinterpret_cast<const char*>(&value), sizeof(value)}, hash);
}

int64_t shard_bytes(const Members& members, const ReduceBuffer& buffer) {
  return buffer.numel / members.size() * dtype_bytes(buffer.dtype);
}

int64_t shard_bytes(const Members& /*members*/, const GatherBuffer& buffer) {
  return buffer.shard_bytes;
}

template <class Buffer>
Packing packing_of(const Members& members, const std::vector<Buffer>& buffers) {
  Packing packing;
  for (const Buffer& buffer : buffers) packing.add(shard_bytes(members, buffer));
  return packing;
}

// Returns the bytes of the packed piece for one peer, or 0 if nothing is packed.
template <class Buffer>
int64_t packed_in(const Staging& staging, const Members& members,
                  const std::vector<Buffer>& buffers) {
  if (staging.bytes == 0) return 0;
  const int64_t lent = staging.bytes;
  const int64_t needed = Channel::staging_bytes(members, buffers);
  PENSTOCK_ASSERT(lent >= needed,
                  concat("[comm::Channel] ", lent, " bytes of staging; needed: ", needed));
  return packing_of(members, buffers).piece(members.size());
}

at::Tensor bytes_at(Address at, int64_t bytes) { return device::view(at, at::kByte, bytes); }

// `staging` holds the packed piece of each member. A packed piece has the shards of all buffers,
// one after another.
void unpack(const Members& members, const std::vector<GatherBuffer>& buffers, Address staging,
            int64_t packed) {
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    Address from = staging + i * packed;
    for (const GatherBuffer& buffer : buffers) {
      const int64_t bytes = buffer.shard_bytes;
      if (bytes > kPackBytes) continue;
      device::copy(buffer.full + i * bytes, from, bytes);
      from = from + bytes;
    }
  }
}

// Sums in member order on every rank, so the result has the same bits everywhere. `received` is the
// first peer's shard; each following peer's shard lies `stride` bytes after the previous one.
void add_up(const Members& members, const ReduceBuffer& buffer, Address received, int64_t stride,
            std::vector<const void*>& sources) {
  sources.clear();
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) {
      sources.push_back((buffer.partial + i * shard_bytes(members, buffer)).data);
    } else {
      sources.push_back(received.data);
      received = received + stride;
    }
  }
  const device::Sum sum{buffer.result,    buffer.result_dtype,           sources,
                        buffer.dtype,     buffer.numel / members.size(), buffer.scale,
                        buffer.accumulate};
  if (buffer.squares == nullptr) return device::sum_chunks(sum);
  *buffer.squares = device::sum_chunks_and_squares(sum);
}

// Sums one tile of this rank's shard. Tiles arrive in order, so the sum of squares continues from
// the previous tile.
void add_tile(const Members& members, const ReduceBuffer& buffer, const Tile& tile,
              std::vector<const void*>& sources) {
  Address own = buffer.partial + members.index * shard_bytes(members, buffer) + tile.offset;
  sources.assign(tile.data.begin(), tile.data.end());
  sources.insert(sources.begin() + members.index, own.data);
  const int64_t before = tile.offset / dtype_bytes(buffer.dtype);
  const device::Sum sum{buffer.result + before * dtype_bytes(buffer.result_dtype),
                        buffer.result_dtype,
                        sources,
                        buffer.dtype,
                        tile.bytes / dtype_bytes(buffer.dtype),
                        buffer.scale,
                        buffer.accumulate};
  if (buffer.squares == nullptr) return device::sum_chunks(sum);
  *buffer.squares = device::sum_chunks_and_squares(sum, *buffer.squares);
}

}  // namespace

int64_t Channel::staging_bytes(const Members& members, const std::vector<GatherBuffer>& buffers) {
  return packing_of(members, buffers).gather_bytes(members.size());
}

int64_t Channel::staging_bytes(const Members& members, const std::vector<ReduceBuffer>& buffers) {
  return packing_of(members, buffers).reduce_bytes(members.size());
}

Label::Label(std::string words) : hash(hash_text(words)) {
  text = std::make_shared<const std::string>(std::move(words));
}

Channel::Channel(Group& group, std::string name, const std::string& shown)
    : group_(group),
      name_(std::move(name)),
      lane_(group.board() == nullptr ? -1
                                     : group.board()->lane(shown.empty() ? *name_.text : shown)) {}

void Channel::use(const Members& members, std::shared_ptr<DeviceCollectives> back_end) {
  on_device_.emplace_back(&members, std::move(back_end));
}

DeviceCollectives* Channel::on_device(const Members& members, Address buffer) {
  if (buffer.device == nullptr) return nullptr;
  const auto found = std::find_if(on_device_.begin(), on_device_.end(),
                                  [&](const auto& one) { return one.first == &members; });
  return found == on_device_.end() ? nullptr : found->second.get();
}

// Starts the next collective and returns its tag.
uint32_t Channel::begin(const Label& label) {
  const int64_t sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  group_.set_position({step_, sequence, name_.text, label.text});
  uint64_t hash = mix(label.hash, name_.hash);
  hash = mix(mix(hash, static_cast<uint64_t>(step_)), static_cast<uint64_t>(sequence));
  // gloo's tags have 31 bits. kLifelineTag stays free for ConnectionWatch.
  return static_cast<uint32_t>(mix(hash, sizes_) % kLifelineTag);
}

// Exchanges all pieces that were added since the last exchange.
void Channel::exchange(const Label& label) {
  meet(label, [&](uint32_t tag) { exchange(tag); });
}

template <class Run>
void Channel::meet(const Label& label, const Run& run) {
  const uint32_t tag = begin(label);
  const Position position{step_, exchanges() - 1, name_.text, label.text};
  Board* const board = group_.board();
  const Waiting waiting(board, lane_, {step_, position.sequence, tag}, *label.text);
  trace::Span span(recorder.get(), trace::Kind::kExchange, label.text);
  for (const PeerBytes& part : sends_) span.add_bytes(part.bytes);
  try {
    run(tag);
  } catch (const std::exception& error) {
    throw lost_peer(group_, recorder.get(), position, reason(error));
  }
}

// Queues a collective of a device on this thread's stream.
void Channel::queue(const Label& label, const device::Device& device, DeviceCollectives& back_end,
                    const std::function<void()>& collective) {
  history_ = mix(history_, begin(label));
  const Position position{step_, exchanges() - 1, name_.text, label.text};
  const trace::Span span(recorder.get(), trace::Kind::kExchange, label.text);
  try {
    back_end.run(position, device.current(), collective);
  } catch (const Aborted& error) {
    throw lost_peer(group_, recorder.get(), position, error.what());
  } catch (const c10::DistError& error) {
    throw lost_peer(group_, recorder.get(), position, reason(error));
  }
}

void Channel::exchange(uint32_t tag) {
  const device::Device* device = nullptr;
  int64_t bytes = 0;
  for (const std::vector<PeerBytes>* parts : {&sends_, &receives_}) {
    for (const PeerBytes& part : *parts) {
      bytes += part.bytes;
      if (part.data.device != nullptr) device = part.data.device;
    }
  }
  sent_.clear();
  received_.clear();
  if (device == nullptr) {
    for (const PeerBytes& part : sends_) sent_.push_back({part.peer, part.data.host(), part.bytes});
    for (const PeerBytes& part : receives_) {
      received_.push_back({part.peer, part.data.host(), part.bytes});
    }
    return group_.exchange(sent_, received_, tag);
  }
  // The group exchanges host memory only ([Note: Between devices]).
  c10::DataPtr pinned = device->allocate_pinned(std::max<int64_t>(1, bytes));
  Address at(pinned.get());
  for (const PeerBytes& part : sends_) {
    device::copy(at, part.data, part.bytes);
    sent_.push_back({part.peer, at.data, part.bytes});
    at = at + part.bytes;
  }
  for (const PeerBytes& part : receives_) {
    received_.push_back({part.peer, at.data, part.bytes});
    at = at + part.bytes;
  }
  device->synchronize();
  group_.exchange(sent_, received_, tag);
  for (size_t i = 0; i < receives_.size(); ++i) {
    device::copy(receives_[i].data, received_[i].data, receives_[i].bytes);
  }
  device->give_back_pinned(std::move(pinned));
}

void Channel::start() {
  sends_.clear();
  receives_.clear();
  sizes_ = hash_text("");
}

void Channel::add_gather(const Members& members, const GatherBuffer& buffer) {
  const Address full = buffer.full;
  const int64_t bytes = buffer.shard_bytes;
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    sends_.push_back({members.ranks[i], full + members.index * bytes, bytes});
    receives_.push_back({members.ranks[i], full + i * bytes, bytes});
  }
}

// After some rounds a member has its own shard and the shards of the members after it. Each round
// adds the shards of more distant members.
void Channel::pass_on(const Label& label, const Members& members,
                      const std::vector<GatherBuffer>& buffers, bool doubling) {
  const int size = members.size();
  for (int have = 1, next = 0; have < size; have = next) {
    const int count = doubling ? std::min(have, size - have) : 1;
    next = have + count;
    // In the ring, each member passes on the shard that it received last.
    const int stride = doubling ? have : 1, first = doubling ? 0 : have - 1;
    const int from = (members.index + stride) % size, to = (members.index + size - stride) % size;
    sends_.clear();
    receives_.clear();
    for (const GatherBuffer& buffer : buffers) {
      const int64_t bytes = buffer.shard_bytes;
      for (int i = first; i < first + count; ++i) {
        sends_.push_back(
            {members.ranks[to], buffer.full + (members.index + i) % size * bytes, bytes});
        receives_.push_back({members.ranks[from], buffer.full + (from + i) % size * bytes, bytes});
      }
    }
    exchange(label);
  }
}

void Channel::gather(const Label& label, const Members& members,
                     const std::vector<GatherBuffer>& buffers) {
  int64_t bytes = 0;
  for (const GatherBuffer& buffer : buffers) bytes += buffer.shard_bytes;
  if (members.size() > kDirect) return pass_on(label, members, buffers, bytes <= kByDoubling);
  for (const GatherBuffer& buffer : buffers) add_gather(members, buffer);
  exchange(label);
}

void Channel::all_gather(const Label& label, const Members& members,
                         const std::vector<GatherBuffer>& buffers, const Staging& staging) {
  if (members.size() == 1) return;
  start();
  const int64_t packed = packed_in(staging, members, buffers);
  Address own = staging.data + members.index * packed;
  travel_.clear();  // the bytes that the collective moves
  for (const GatherBuffer& buffer : buffers) {
    const int64_t bytes = buffer.shard_bytes;
    sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
    if (packed == 0 || bytes > kPackBytes) {
      travel_.push_back(buffer);
      continue;
    }
    device::copy(own, buffer.full + members.index * bytes, bytes);
    own = own + bytes;
  }
  if (packed > 0) travel_.push_back({staging.data, packed});
  sizes_ = mix(sizes_, static_cast<uint64_t>(packed));
  // The shards are sent, packed or in place, over the device's back end or over the group.
  if (DeviceCollectives* const back_end =
          on_device(members, buffers.empty() ? Address() : buffers.front().full)) {
    std::vector<DeviceCollectives::Gather> gathers;
    for (const GatherBuffer& one : travel_) {
      gathers.push_back({bytes_at(one.full, one.shard_bytes * members.size()),
                         bytes_at(one.full + members.index * one.shard_bytes, one.shard_bytes)});
    }
    queue(label, *buffers.front().full.device, *back_end, [&] { back_end->all_gather(gathers); });
  } else {
    gather(label, members, travel_);
  }
  if (packed > 0) unpack(members, buffers, staging.data, packed);
}

void Channel::add_reduce(const Members& members, const ReduceBuffer& buffer) {
  const int64_t bytes = shard_bytes(members, buffer);
  Address slot = buffer.scratch;
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    sends_.push_back({members.ranks[i], buffer.partial + i * bytes, bytes});
    receives_.push_back({members.ranks[i], slot, bytes});
    slot = slot + bytes;
  }
}

// Layout of the staging: a piece to send to each peer, then a piece from each peer.
void Channel::add_packed(const Members& members, const std::vector<ReduceBuffer>& buffers,
                         Address staging, int64_t packed) {
  sizes_ = mix(sizes_, static_cast<uint64_t>(packed));
  Address send = staging, receive = staging + (members.size() - 1) * packed;
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    Address to = send;
    for (const ReduceBuffer& buffer : buffers) {
      const int64_t bytes = shard_bytes(members, buffer);
      if (bytes > kPackBytes) continue;
      device::copy(to, buffer.partial + i * bytes, bytes);
      to = to + bytes;
    }
    sends_.push_back({members.ranks[i], send, packed});
    receives_.push_back({members.ranks[i], receive, packed});
    send = send + packed;
    receive = receive + packed;
  }
}

// NCCL and similar back ends add in the dtype of the buffer. So low-precision sums are made here in
// fp32, from rows that an all-to-all exchanges. The all-to-all moves as many bytes as a
// reduce-scatter.
void Channel::reduce_on_device(const Label& label, const Members& members,
                               const std::vector<ReduceBuffer>& buffers,
                               DeviceCollectives& back_end) {
  for (const ReduceBuffer& buffer : buffers) {
    sizes_ = mix(sizes_, static_cast<uint64_t>(shard_bytes(members, buffer)));
  }
  queue(label, *buffers.front().partial.device, back_end, [&] {
    for (const ReduceBuffer& buffer : buffers) {
      const int64_t shard = buffer.numel / members.size();
      const at::Tensor partial = device::view(buffer.partial, buffer.dtype, buffer.numel);
      if (buffer.dtype == Dtype::kFp32) {
        back_end.reduce_scatter(device::view(buffer.scratch, buffer.dtype, shard), partial);
        const void* const sum = buffer.scratch.data;
        device::sum_chunks({buffer.result,
                            buffer.result_dtype,
                            {&sum, 1},
                            buffer.dtype,
                            shard,
                            buffer.scale,
                            buffer.accumulate});
        continue;
      }
      back_end.all_to_all(device::view(buffer.scratch, buffer.dtype, buffer.numel), partial);
      const int64_t bytes = shard_bytes(members, buffer);
      sources_.clear();
      for (int i = 0; i < members.size(); ++i)
        sources_.push_back((buffer.scratch + i * bytes).data);
      device::sum_chunks({buffer.result, buffer.result_dtype, sources_, buffer.dtype, shard,
                          buffer.scale, buffer.accumulate});
    }
  });
}

// Exchanges the pieces that were added to sends_. `received` is the place for the packed pieces;
// `received.bytes` is the size of one peer's piece. Returns false if the group does not support
// tiles, if the memory is on a device, or if everything is packed.
bool Channel::reduce_in_tiles(const Members& members, const std::vector<ReduceBuffer>& buffers,
                              const Staging& received, uint32_t tag) {
  tiles_.peers.clear();
  tiles_.bytes.clear();
  tiled_.clear();
  sent_.clear();
  for (const ReduceBuffer& buffer : buffers) {
    if (buffer.partial.device != nullptr) return false;
    const int64_t bytes = shard_bytes(members, buffer);
    if (received.bytes > 0 && bytes <= kPackBytes) continue;
    tiles_.bytes.push_back(bytes);
    tiled_.push_back(&buffer);
    if (buffer.squares != nullptr) *buffer.squares = 0.0;
  }
  if (tiled_.empty()) return false;
  if (received.bytes > 0) tiles_.bytes.push_back(received.bytes);
  for (int i = 0; i < members.size(); ++i) {
    if (i != members.index) tiles_.peers.push_back(members.ranks[i]);
  }
  for (const PeerBytes& part : sends_) sent_.push_back({part.peer, part.data.host(), part.bytes});
  const auto take = [&](const Tile& tile) {
    if (tile.piece < tiled_.size()) return add_tile(members, *tiled_[tile.piece], tile, sources_);
    Address to = received.data + tile.offset;
    for (const void* from : tile.data) {
      std::memcpy(to.host(), from, static_cast<size_t>(tile.bytes));
      to = to + received.bytes;
    }
  };
  // std::ref keeps the function object from allocating memory.
  return group_.exchange_tiles(sent_, tiles_, tag, std::ref(take));
}

void Channel::reduce_scatter(const Label& label, const Members& members,
                             const std::vector<ReduceBuffer>& buffers, const Staging& staging) {
  start();
  DeviceCollectives* const back_end =
      on_device(members, buffers.empty() ? Address() : buffers.front().partial);
  if (back_end != nullptr && members.size() > 1) {
    return reduce_on_device(label, members, buffers, *back_end);
  }
  const int64_t packed = packed_in(staging, members, buffers);
  for (const ReduceBuffer& buffer : buffers) {
    const int64_t bytes = shard_bytes(members, buffer);
    sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
    if (packed == 0 || bytes > kPackBytes) add_reduce(members, buffer);
  }
  if (packed > 0) add_packed(members, buffers, staging.data, packed);
  // The shards that were packed arrive in the second half of the staging.
  Address received = staging.data + (members.size() - 1) * packed;
  bool in_tiles = false;
  if (members.size() > 1) {
    meet(label, [&](uint32_t tag) {
      in_tiles = reduce_in_tiles(members, buffers, {received, packed}, tag);
      if (!in_tiles) exchange(tag);
    });
  }
  for (const ReduceBuffer& buffer : buffers) {
    const int64_t bytes = shard_bytes(members, buffer);
    if (packed == 0 || bytes > kPackBytes) {
      if (!in_tiles) add_up(members, buffer, buffer.scratch, bytes, sources_);
      continue;
    }
    add_up(members, buffer, received, packed, sources_);
    received = received + bytes;
  }
}

void Channel::all_reduce(const Label& label, const Members& members,
                         const std::vector<ReduceBuffer>& buffers, const Staging& staging) {
  // Makes a reduce-scatter in place and then an all-gather of the sums.
  reduces_ = buffers;
  gathers_.clear();
  for (ReduceBuffer& buffer : reduces_) {
    const int64_t bytes = shard_bytes(members, buffer);
    buffer.result = buffer.partial + members.index * bytes;
    buffer.result_dtype = buffer.dtype;
    buffer.accumulate = false;
    gathers_.push_back({buffer.partial, bytes});
  }
  reduce_scatter(label, members, reduces_, staging);
  all_gather(label, members, gathers_, staging);
}

void Channel::broadcast(const Label& label, const Members& members, Address data, int64_t bytes) {
  if (members.size() == 1) return;
  start();
  sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
  if (DeviceCollectives* const back_end = on_device(members, data)) {
    return queue(label, *data.device, *back_end,
                 [&] { back_end->broadcast(bytes_at(data, bytes)); });
  }
  // Binomial tree: after each round twice as many members have the bytes.
  for (int have = 1; have < members.size(); have *= 2) {
    sends_.clear();
    receives_.clear();
    const int to = members.index + have, from = members.index - have;
    if (members.index < have && to < members.size()) {
      sends_.push_back({members.ranks[to], data, bytes});
    } else if (from >= 0 && from < have) {
      receives_.push_back({members.ranks[from], data, bytes});
    }
    exchange(label);
  }
}

void Channel::all_to_all(const Label& label, const Members& members, Address from, Address to,
                         int64_t bytes) {
  if (members.size() == 1) return;
  start();
  sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
  if (DeviceCollectives* const back_end = on_device(members, from)) {
    const int64_t all = bytes * members.size();
    return queue(label, *from.device, *back_end,
                 [&] { back_end->all_to_all(bytes_at(to, all), bytes_at(from, all)); });
  }
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    sends_.push_back({members.ranks[i], from + i * bytes, bytes});
    receives_.push_back({members.ranks[i], to + i * bytes, bytes});
  }
  exchange(label);
}

void Channel::shift(const Label& label, const Members& members, Address from, Address to,
                    int64_t bytes) {
  if (members.size() == 1) return;
  start();
  sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
  const int size = members.size();
  const int next = (members.index + 1) % size, previous = (members.index + size - 1) % size;
  if (DeviceCollectives* const back_end = on_device(members, from)) {
    return queue(label, *from.device, *back_end, [&] {
      back_end->shift(bytes_at(to, bytes), bytes_at(from, bytes), previous, next, size);
    });
  }
  sends_.push_back({members.ranks[next], from, bytes});
  receives_.push_back({members.ranks[previous], to, bytes});
  exchange(label);
}

void Channel::collect(const Label& label, const Members& owners, void* data, int64_t shard_bytes) {
  if (owners.size() == 1) return;
  start();
  sizes_ = mix(sizes_, static_cast<uint64_t>(shard_bytes));
  if (owners.index > 0) sends_.push_back({owners.ranks[0], data, shard_bytes});
  for (int i = 1; i < owners.size() && owners.index == 0; ++i) {
    receives_.push_back({owners.ranks[i], static_cast<char*>(data) + i * shard_bytes, shard_bytes});
  }
  exchange(label);
}

std::vector<std::string> Channel::share(const Label& label, const Members& members,
                                        const std::string& payload) {
  const auto size = static_cast<int64_t>(payload.size());
  std::string all(payload.size() * members.size(), '\0');
  payload.copy(all.data() + members.index * size, payload.size());
  all_gather(label, members, {{all.data(), size}});
  std::vector<std::string> parts;
  for (int i = 0; i < members.size(); ++i) parts.push_back(all.substr(i * size, size));
  return parts;
}

}  // namespace penstock::comm
