#include "src/comm/channel.h"

#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/comm/sum.h"
#include "src/place/packing.h"

namespace penstock::comm {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) {
  return hash_text({reinterpret_cast<const char*>(&value), sizeof(value)}, hash);
}

int64_t shard_bytes(const Members& members, const ReduceBuffer& buffer) {
  return buffer.numel / members.size() * dtype_bytes(buffer.dtype);
}

int64_t shard_bytes(const Members& /*members*/, const GatherBuffer& buffer) {
  return buffer.shard_bytes;
}

// A shard of no bytes may have no address.
void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

template <class Buffer>
Packing packing_of(const Members& members, const std::vector<Buffer>& buffers) {
  Packing packing;
  for (const Buffer& buffer : buffers) packing.add(shard_bytes(members, buffer));
  return packing;
}

// 0: nothing is packed.
template <class Buffer>
int64_t packed_in(std::span<char> staging, const Members& members,
                  const std::vector<Buffer>& buffers) {
  if (staging.empty()) return 0;
  const auto lent = static_cast<int64_t>(staging.size());
  const int64_t needed = Channel::staging_bytes(members, buffers);
  PENSTOCK_ASSERT(lent >= needed, concat("[comm::Channel] ", lent, " bytes lent of ", needed));
  return packing_of(members, buffers).piece(members.size());
}

// `staging`: each member's shards, one buffer after the other.
void unpack(const Members& members, const std::vector<GatherBuffer>& buffers, const char* staging,
            int64_t packed) {
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    const char* from = staging + i * packed;
    for (const GatherBuffer& buffer : buffers) {
      const int64_t bytes = buffer.shard_bytes;
      if (bytes > kPackBytes) continue;
      copy(static_cast<char*>(buffer.full) + i * bytes, from, bytes);
      from += bytes;
    }
  }
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

Channel::Channel(Group& group, std::string name)
    : group_(group),
      name_(std::move(name)),
      lane_(group.board() == nullptr ? -1 : group.board()->lane(*name_.text)) {}

// What was added since the last one.
void Channel::exchange(const Label& label) {
  const Position position{step_, exchanges(), name_.text, label.text};
  group_.set_position(position);
  uint64_t hash = mix(label.hash, name_.hash);
  hash = mix(mix(hash, static_cast<uint64_t>(step_)), static_cast<uint64_t>(position.sequence));
  // gloo takes tags of 31 bits.
  const auto tag = static_cast<uint32_t>(mix(hash, sizes_) & 0x7fffffffU);
  sequence_.fetch_add(1, std::memory_order_relaxed);
  Board* const board = group_.board();
  const Waiting waiting(board, lane_, {step_, position.sequence, tag}, *label.text);
  try {
    group_.exchange(sends_, receives_, tag);
  } catch (const std::exception& error) {
    const std::string text =
        concat("[comm::exchange] rank ", group_.rank(), " at ", position.text(),
               " lost a peer: ", group_.roll_call(error.what()));
    throw RuntimeFault(text + (board == nullptr ? "" : board->report(text)));
  }
}

void Channel::start() {
  sends_.clear();
  receives_.clear();
  sizes_ = hash_text("");
}

void Channel::add_gather(const Members& members, const GatherBuffer& buffer) {
  char* full = static_cast<char*>(buffer.full);
  const int64_t bytes = buffer.shard_bytes;
  sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    sends_.push_back({members.ranks[i], full + members.index * bytes, bytes});
    receives_.push_back({members.ranks[i], full + i * bytes, bytes});
  }
}

void Channel::all_gather(const Label& label, const Members& members,
                         const std::vector<GatherBuffer>& buffers, std::span<char> staging) {
  if (members.size() == 1) return;
  start();
  const int64_t packed = packed_in(staging, members, buffers);
  char* own = staging.data() + members.index * packed;
  for (const GatherBuffer& buffer : buffers) {
    const int64_t bytes = buffer.shard_bytes;
    if (packed == 0 || bytes > kPackBytes) {
      add_gather(members, buffer);
      continue;
    }
    sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
    const char* shard = static_cast<const char*>(buffer.full) + members.index * bytes;
    copy(own, shard, bytes);
    own += bytes;
  }
  if (packed > 0) add_gather(members, {staging.data(), packed});
  exchange(label);
  if (packed > 0) unpack(members, buffers, staging.data(), packed);
}

void Channel::add_reduce(const Members& members, const ReduceBuffer& buffer) {
  const int64_t bytes = shard_bytes(members, buffer);
  char* slot = static_cast<char*>(buffer.scratch);
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    sends_.push_back({members.ranks[i], static_cast<char*>(buffer.partial) + i * bytes, bytes});
    receives_.push_back({members.ranks[i], slot, bytes});
    slot += bytes;
  }
}

// Staging: a piece to send for each peer, then a piece from each.
void Channel::add_packed(const Members& members, const std::vector<ReduceBuffer>& buffers,
                         char* staging, int64_t packed) {
  sizes_ = mix(sizes_, static_cast<uint64_t>(packed));
  char* send = staging;
  char* receive = staging + (members.size() - 1) * packed;
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) continue;
    char* to = send;
    for (const ReduceBuffer& buffer : buffers) {
      const int64_t bytes = shard_bytes(members, buffer);
      if (bytes > kPackBytes) continue;
      const char* shard = static_cast<const char*>(buffer.partial) + i * bytes;
      copy(to, shard, bytes);
      to += bytes;
    }
    sends_.push_back({members.ranks[i], send, packed});
    receives_.push_back({members.ranks[i], receive, packed});
    send += packed;
    receive += packed;
  }
}

// In member order, whoever sums: the same bits everywhere. `received` is the first peer's shard,
// the next one's is `stride` bytes further.
void Channel::add_up(const Members& members, const ReduceBuffer& buffer, const char* received,
                     int64_t stride) {
  sources_.clear();
  for (int i = 0; i < members.size(); ++i) {
    if (i == members.index) {
      const int64_t own = i * shard_bytes(members, buffer);
      sources_.push_back(static_cast<const char*>(buffer.partial) + own);
    } else {
      sources_.push_back(received);
      received += stride;
    }
  }
  const Sum sum{buffer.result,    buffer.result_dtype,           sources_,
                buffer.dtype,     buffer.numel / members.size(), buffer.scale,
                buffer.accumulate};
  if (buffer.squares == nullptr) return sum_chunks(sum);
  *buffer.squares = sum_chunks_and_squares(sum);
}

void Channel::reduce_scatter(const Label& label, const Members& members,
                             const std::vector<ReduceBuffer>& buffers, std::span<char> staging) {
  start();
  const int64_t packed = packed_in(staging, members, buffers);
  for (const ReduceBuffer& buffer : buffers) {
    const int64_t bytes = shard_bytes(members, buffer);
    sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
    if (packed == 0 || bytes > kPackBytes) add_reduce(members, buffer);
  }
  if (packed > 0) add_packed(members, buffers, staging.data(), packed);
  if (members.size() > 1) exchange(label);
  const char* received = staging.data() + (members.size() - 1) * packed;
  for (const ReduceBuffer& buffer : buffers) {
    const int64_t bytes = shard_bytes(members, buffer);
    if (packed == 0 || bytes > kPackBytes) {
      add_up(members, buffer, static_cast<const char*>(buffer.scratch), bytes);
      continue;
    }
    add_up(members, buffer, received, packed);
    received += bytes;
  }
}

void Channel::all_reduce(const Label& label, const Members& members,
                         const std::vector<ReduceBuffer>& buffers, std::span<char> staging) {
  reduces_ = buffers;
  gathers_.clear();
  for (ReduceBuffer& buffer : reduces_) {
    const int64_t bytes = shard_bytes(members, buffer);
    buffer.result = static_cast<char*>(buffer.partial) + members.index * bytes;
    buffer.result_dtype = buffer.dtype;
    buffer.accumulate = false;
    gathers_.push_back({buffer.partial, bytes});
  }
  reduce_scatter(label, members, reduces_, staging);
  all_gather(label, members, gathers_, staging);
}

void Channel::broadcast(const Label& label, const Members& members, void* data, int64_t bytes) {
  if (members.size() == 1) return;
  start();
  sizes_ = mix(sizes_, static_cast<uint64_t>(bytes));
  if (members.index != 0) receives_.push_back({members.ranks[0], data, bytes});
  for (int i = 1; i < members.size() && members.index == 0; ++i) {
    sends_.push_back({members.ranks[i], data, bytes});
  }
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
