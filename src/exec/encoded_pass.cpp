#include "src/exec/encoded_pass.h"

#include <utility>

#include "src/base/text.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"

namespace penstock::exec {

using device::Address;

void EncodedPass::add(Encoding part) {
  part.offset = piece_;
  piece_ += wire_.encoded_bytes(part.numel);
  parts_.push_back(part);
}

void EncodedPass::add_gather(Address own, Address full, Dtype dtype, int64_t numel) {
  add({.own = own, .full = full, .dtype = dtype, .numel = numel});
}

void EncodedPass::add_sum(const comm::ReduceBuffer& buffer, bool everywhere, uint64_t noise) {
  sums_ = true;
  everywhere_ = everywhere;
  Encoding part{.full = buffer.partial,
                .sum = buffer,
                .dtype = buffer.dtype,
                .numel = buffer.numel / members_.size(),
                .noise = noise};
  if (everywhere) {  // the sum overwrites this rank's own addends
    part.sum.result = shard(part, buffer.partial, members_.index);
    part.sum.result_dtype = buffer.dtype;
    part.sum.accumulate = false;
  }
  add(part);
}

void EncodedPass::feed(const device::Residual& residual,
                       std::shared_ptr<const device::Residual::Ranges> gaps) {
  parts_.back().residual = residual;
  parts_.back().gaps = std::move(gaps);
}

// A sum needs room for the pieces that it sends and for the pieces that it receives.
int64_t EncodedPass::room_bytes() const { return piece_ * members_.size() * (sums_ ? 2 : 1); }

// Returns the key of the encoding's noise ([Note: Noise]).
uint64_t EncodedPass::key(const Encoding& part, int64_t step) const {
  const uint64_t facts[] = {part.noise, static_cast<uint64_t>(step), number_,
                            static_cast<uint64_t>(members_.index)};
  return hash_text({reinterpret_cast<const char*>(facts), sizeof(facts)});
}

Address EncodedPass::shard(const Encoding& part, Address full, int member) const {
  return full + member * part.numel * dtype_bytes(part.dtype);
}

void EncodedPass::run(comm::Channel& channel, const comm::Label& label, Address room) {
  if (sums_) return sum(channel, label, room);
  gather(channel, label, room);
}

// This rank's own shard is decoded as well, so that all members have equal values. Deltas ([Note:
// Deltas]) are added to the old values of `full`.
void EncodedPass::gather(comm::Channel& channel, const comm::Label& label, Address room) {
  for (const Encoding& part : parts_) {
    const Address held = shard(part, part.full, members_.index);
    device::encode(room + members_.index * piece_ + part.offset,
                   {part.own, part.dtype, part.numel, wire_.delta ? held : Address()}, wire_,
                   {key(part, channel.step()), 0});
  }
  channel.all_gather(label, members_, {{room, piece_}});
  for (int member = 0; member < members_.size(); ++member) {
    for (const Encoding& part : parts_) {
      const void* const piece = (room + member * piece_ + part.offset).data;
      device::decode_sum({.dst = shard(part, part.full, member),
                          .dst_dtype = part.dtype,
                          .sources = {&piece, 1},
                          .numel = part.numel,
                          .accumulate = wire_.delta},
                         wire_);
    }
  }
}

void EncodedPass::sum(comm::Channel& channel, const comm::Label& label, Address room) {
  const Address received = room + members_.size() * piece_;
  for (int member = 0; member < members_.size(); ++member) {
    const Address piece = room + member * piece_;
    for (const Encoding& part : parts_) {
      const int64_t first = member * part.numel;
      device::encode(piece + part.offset, {shard(part, part.full, member), part.dtype, part.numel},
                     wire_, {key(part, channel.step()), first}, part.residual.from(first));
    }
  }
  device::copy(received + members_.index * piece_, room + members_.index * piece_, piece_);
  channel.all_to_all(label, members_, room, received, piece_);
  std::vector<const void*> sources(static_cast<size_t>(members_.size()));
  for (const Encoding& part : parts_) {
    for (int member = 0; member < members_.size(); ++member) {
      sources[static_cast<size_t>(member)] = (received + member * piece_ + part.offset).data;
    }
    const comm::ReduceBuffer& to = part.sum;
    device::decode_sum(
        {to.result, to.result_dtype, sources, Dtype::kFp32, part.numel, to.scale, to.accumulate},
        wire_);
    for (const auto& [begin, end] : part.gaps ? *part.gaps : device::Residual::Ranges()) {
      const int64_t size = dtype_bytes(to.result_dtype);
      device::zero(to.result + begin * size, (end - begin) * size);
    }
  }
  if (everywhere_) {
    EncodedPass sums(wire_, members_, ~number_);
    for (const Encoding& part : parts_) {
      sums.add({.own = part.sum.result,
                .full = part.full,
                .dtype = part.dtype,
                .numel = part.numel,
                .noise = part.noise});
    }
    sums.gather(channel, label, room);
  }
  for (const Encoding& part : parts_) {
    if (part.sum.squares == nullptr) continue;
    *part.sum.squares =
        device::host::sum_squares(part.sum.result.host(), part.sum.result_dtype, part.numel);
  }
}

}  // namespace penstock::exec
