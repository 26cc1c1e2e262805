#include "src/comm/channel.h"

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/comm/sum.h"

namespace penstock::comm {

Channel::Channel(Group& group, std::string name) : group_(group), name_(std::move(name)) {}

void Channel::exchange(const std::string& label, const std::vector<Piece>& sends,
                       const std::vector<Piece>& receives) {
  // A broadcast sends on one side and receives on the other, hence the larger of both; the sizes
  // are per peer, since the number of peers differs there too.
  int64_t bytes = 0;
  for (const auto& pieces : {sends, receives}) {
    for (const Piece& piece : pieces) bytes = std::max(bytes, piece.bytes);
  }
  const std::string position =
      concat("step ", step_, ", collective ", sequence_, " of lane ", name_, ", `", label, "`");
  group_.set_position(position);
  // gloo takes tags of 31 bits.
  const auto tag = static_cast<uint32_t>(hash_text(concat(position, bytes)) & 0x7fffffffU);
  ++sequence_;
  try {
    group_.exchange(sends, receives, tag);
  } catch (const std::exception& error) {
    throw RuntimeFault(concat("[comm::exchange] rank ", group_.rank(), " at ", position,
                              " lost a peer: ", group_.roll_call(error.what())));
  }
}

void Channel::all_gather(const std::string& label, const Members& members,
                         const std::vector<GatherBuffer>& buffers) {
  if (members.size() == 1) return;
  std::vector<Piece> sends, receives;
  for (const GatherBuffer& buffer : buffers) {
    char* full = static_cast<char*>(buffer.full);
    for (int i = 0; i < members.size(); ++i) {
      if (i == members.index) continue;
      sends.push_back(
          {members.ranks[i], full + members.index * buffer.shard_bytes, buffer.shard_bytes});
      receives.push_back({members.ranks[i], full + i * buffer.shard_bytes, buffer.shard_bytes});
    }
  }
  exchange(label, sends, receives);
}

void Channel::reduce_scatter(const std::string& label, const Members& members,
                             const std::vector<ReduceBuffer>& buffers) {
  const int size = members.size();
  std::vector<Piece> sends, receives;
  for (const ReduceBuffer& buffer : buffers) {
    const int64_t bytes = buffer.numel / size * dtype_bytes(buffer.dtype);
    char* partial = static_cast<char*>(buffer.partial);
    char* slot = static_cast<char*>(buffer.scratch);
    for (int i = 0; i < size; ++i) {
      if (i == members.index) continue;
      sends.push_back({members.ranks[i], partial + i * bytes, bytes});
      receives.push_back({members.ranks[i], slot, bytes});
      slot += bytes;
    }
  }
  if (size > 1) exchange(label, sends, receives);
  for (const ReduceBuffer& buffer : buffers) {
    const int64_t numel = buffer.numel / size;
    const int64_t bytes = numel * dtype_bytes(buffer.dtype);
    const char* slot = static_cast<const char*>(buffer.scratch);
    std::vector<const void*> sources;
    for (int i = 0; i < size; ++i) {
      if (i == members.index) {
        sources.push_back(static_cast<const char*>(buffer.partial) + i * bytes);
      } else {
        sources.push_back(slot);
        slot += bytes;
      }
    }
    sum_chunks(buffer.result, buffer.result_dtype, sources, buffer.dtype, numel, buffer.scale,
               buffer.accumulate);
  }
}

void Channel::all_reduce(const std::string& label, const Members& members,
                         const std::vector<ReduceBuffer>& buffers) {
  std::vector<ReduceBuffer> reduces = buffers;
  std::vector<GatherBuffer> gathers;
  for (ReduceBuffer& buffer : reduces) {
    const int64_t shard_bytes = buffer.numel / members.size() * dtype_bytes(buffer.dtype);
    buffer.result = static_cast<char*>(buffer.partial) + members.index * shard_bytes;
    buffer.result_dtype = buffer.dtype;
    buffer.accumulate = false;
    gathers.push_back({buffer.partial, shard_bytes});
  }
  reduce_scatter(label, members, reduces);
  all_gather(label, members, gathers);
}

void Channel::broadcast(const std::string& label, const Members& members, void* data,
                        int64_t bytes) {
  std::vector<Piece> sends, receives;
  for (int i = 1; i < members.size() && members.index == 0; ++i) {
    sends.push_back({members.ranks[i], data, bytes});
  }
  if (members.index != 0) receives.push_back({members.ranks[0], data, bytes});
  if (members.size() > 1) exchange(label, sends, receives);
}

std::vector<std::string> Channel::share(const std::string& label, const Members& members,
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
