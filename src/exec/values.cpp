#include "src/exec/values.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "src/base/text.h"
#include "src/optim/kernels.h"

namespace penstock::exec {

namespace {

at::Tensor zeros32(int64_t numel) { return at::zeros({numel}, at::TensorOptions(at::kFloat)); }
char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

}  // namespace

// `own` is this rank's part, in the placement's dtype; it is not changed.
at::Tensor Values::whole(Placement place, const void* own, const Flat& flat,
                         const std::string& label) {
  at::Tensor full = zeros32(flat.numel);
  gather(place, static_cast<const char*>(own), flat, label, bytes_of(full));
  return full;
}

void Values::gather(const Placement& from, const char* own, const Flat& flat,
                    const std::string& label, char* full) {
  Placement place = from, wanted = rank_.whole();
  place.tier = Tier::kDevice;
  wanted.dtype = Dtype::kFp32;
  Walk walk = rank_.walk(place, hops(place, wanted), false);
  walk.add({const_cast<char*>(own), full, place.dtype, Dtype::kFp32, flat.numel});
  walk.run(rank_.control_channel, label);
}

// This rank's part from memory or disk, whatever its dtype.
at::Tensor Values::read(Buffer& own, Placement place, mem::Account account, const Flat& flat,
                        const std::string& label) {
  rank_.traffic.fetch(own, account);
  rank_.traffic.wait_read(own);
  place.dtype = own.dtype;
  at::Tensor full = whole(place, own.data(), flat, label);
  rank_.traffic.let_go(own);
  return full;
}

// In fp32, with chunks put together.
void Values::own_masters(Flat& flat, char* to) {
  for (ChunkState& chunk : flat.chunks) {
    const float* master = updates_.fetch_master(flat, chunk);
    std::memcpy(to + chunk.begin * 4, master, chunk.numel * 4);
    rank_.traffic.let_go(chunk.optim.back().buffers.front());
  }
}

Dtype Values::parameters(int unit, int index, char* room, bool everywhere) {
  updates_.finish();
  Flat& flat = rank_.units[unit].flats[index];
  const std::string label = concat("read u", unit, ".", index, " param");
  // What is in one chunk may be elsewhere than where it is updated.
  const bool one = flat.trainable && flat.chunks.size() == 1 && rank_.table.has_master(flat.dtype);
  Buffer* kept = one ? &flat.chunks.front().optim.back().buffers.front() : nullptr;
  Placement place = one ? rank_.cell(Role::kOptim, Phase::kRest) : rank_.table.master();
  if (!flat.trainable) {
    kept = &flat.rest().one();
    place = flat.rest().place;
  }
  place.dtype = kept == nullptr ? Dtype::kFp32 : kept->dtype;
  if (kept != nullptr) {
    rank_.traffic.fetch(*kept, one ? mem::Account::kOptim : mem::Account::kParam);
    rank_.traffic.wait_read(*kept);
  }
  const int64_t part_bytes = rank_.numel_of(place, flat) * dtype_bytes(place.dtype);
  const bool arrives = everywhere || rank_.group.rank() == 0;
  char* own =
      arrives ? room + shard_index(place, rank_.mesh, rank_.group.rank()) * part_bytes : room;
  if (kept == nullptr) own_masters(flat, own);
  if (everywhere) {
    gather(place, kept == nullptr ? own : kept->data(), flat, label, room);
  } else {
    if (kept != nullptr && arrives) std::memcpy(own, kept->data(), part_bytes);
    rank_.control_channel.collect(label, owners(place, rank_.mesh, rank_.group.rank()),
                                  kept == nullptr || arrives ? own : kept->data(), part_bytes);
  }
  if (kept != nullptr) rank_.traffic.let_go(*kept);
  const Dtype made = everywhere ? Dtype::kFp32 : place.dtype;
  if (arrives && rank_.users_write(flat)) {
    const Buffer& rest = flat.rest().one();
    optim::take_edits(room, made, rest.data(), rest.dtype, flat.numel);
  }
  return made;
}

at::Tensor Values::resting(int unit, int index) {
  Flat& flat = rank_.units[unit].flats[index];
  const std::string label = concat("last u", unit, ".", index, " param");
  return read(flat.rest().one(), flat.rest().place, mem::Account::kParam, flat, label);
}

// Of a sum that backwards may still add to, what was written counts.
at::Tensor Values::open_sum(const Flat& flat, const Copy* sum, const std::string& label) {
  const at::Tensor own = zeros32(flat.numel);
  for (const Slot& slot : flat.slots) {
    if (sum == nullptr || !slot.written) continue;
    optim::take(bytes_of(own) + slot.offset * 4, Dtype::kFp32, sum->one().at(slot.offset),
                sum->one().dtype, slot.numel, false);
  }
  Placement place = rank_.table.grad_after_backward();
  place.dtype = Dtype::kFp32;
  return whole(place, own.data_ptr(), flat, label);
}

at::Tensor Values::gradient(int unit, int index) {
  updates_.finish();
  gradients_.finish();
  Flat& flat = rank_.units[unit].flats[index];
  const std::string label = concat("read u", unit, ".", index, " grad");
  const Placement& made = rank_.table.grad_after_backward();
  at::Tensor full = zeros32(flat.numel);
  for (Copy& copy : flat.grads) {
    if (!copy.valid || copy.place == made) continue;
    full.add_(read(copy.one(), copy.place, mem::Account::kGrad, flat, label));
  }
  // Where gradients rest as sums of this rank's, every rank must take part, whoever has some.
  const Copy* open = find(flat.grads, made);
  if (rank_.table.holds_grad_in_place() || open != nullptr) full.add_(open_sum(flat, open, label));
  return full;
}

void Values::show(Flat& flat) {
  if (flat.rest().place == rank_.whole()) {
    flat.attach(flat.rest().one().data());
  } else {
    flat.detach();
  }
}

// From fp32 values under another placement.
void Values::set_rest(Flat& flat, const Placement& at, char* values, const std::string& label) {
  Placement from = at;
  from.dtype = Dtype::kFp32;
  Buffer& rest = flat.rest().one();
  rank_.traffic.make_room(rest, mem::Account::kParam);
  from.tier = rank_.whole().tier;
  Walk walk = rank_.walk(from, hops(from, flat.rest().place), false);
  walk.add({values, rest.data(), Dtype::kFp32, rest.dtype, flat.numel});
  walk.run(rank_.control_channel, label);
  show(flat);
  rank_.traffic.put_back(rest);
}

void Values::restore(int unit, Flat& flat, const Placement& place, char* masters) {
  for (ChunkState& chunk : flat.chunks) {
    Buffer& master = chunk.optim.front().buffers.front();
    if (!master.exists()) continue;
    rank_.traffic.settle();  // one of them in memory, beside the masters
    rank_.traffic.make_room(master, mem::Account::kOptim);
    std::memcpy(master.data(), masters + chunk.begin * 4, master.bytes());
    rank_.traffic.put_back(master);
  }
  set_rest(flat, place, masters, concat("restore u", unit));
}

void Values::adopt(Flat& flat, const at::Tensor& full, const std::string& label) {
  rank_.control_channel.broadcast(label, rank_.everyone(), full.data_ptr(), flat.numel * 4);
  set_rest(flat, rank_.whole(), bytes_of(full), label);
  for (ChunkState& chunk : flat.chunks) {
    std::vector<Buffer>& buffers = chunk.optim.front().buffers;
    const Placement& place = chunk.optim.front().place;
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (!buffers[i].exists()) continue;
      rank_.traffic.settle();  // one of them in memory, beside the full values
      rank_.traffic.make_room(buffers[i], mem::Account::kOptim);
      const int64_t first = rank_.begin_of(place, flat) + chunk.begin;
      if (i == 0) {
        std::memcpy(buffers[i].data(), bytes_of(full) + first * 4, buffers[i].bytes());
      } else {
        std::memset(buffers[i].data(), 0, buffers[i].bytes());
      }
      rank_.traffic.put_back(buffers[i]);
    }
  }
  rank_.traffic.settle();
}

void Values::refresh(int index) {
  updates_.finish();
  for (Flat& flat : rank_.units[index].flats) {
    Buffer& whole = find(flat.params, rank_.whole())->one();
    rank_.control_channel.broadcast(concat("refresh u", index), rank_.everyone(), whole.data(),
                                    whole.bytes());
    write(flat, 0, flat.numel, whole.data());
    for (Slot& slot : flat.slots) slot.version = slot.param._version();
  }
}

void Values::write(Flat& flat, int64_t first, int64_t numel, const char* values) {
  const int64_t size = flat.element_bytes();
  const auto into = [&](Buffer& buffer, int64_t begin, mem::Account account) {
    const int64_t from = std::max(first, begin);
    const int64_t to = std::min(first + numel, begin + buffer.numel);
    if (from >= to) return;
    rank_.traffic.fetch(buffer, account);
    rank_.traffic.wait_read(buffer);
    rank_.traffic.changes(buffer);
    optim::take_edits(buffer.at(from - begin), buffer.dtype, values + (from - first) * size,
                      flat.dtype, to - from);
    rank_.traffic.put_back(buffer);
    rank_.traffic.settle();
  };
  const Placement& rest = flat.rest().place;
  if (rank_.whole() != rest) {
    into(flat.rest().one(), rank_.begin_of(rest, flat), mem::Account::kParam);
  }
  for (ChunkState& chunk : flat.chunks) {
    Buffer& master = chunk.optim.front().buffers.front();
    const int64_t begin = rank_.begin_of(chunk.optim.front().place, flat) + chunk.begin;
    if (master.exists()) into(master, begin, mem::Account::kOptim);
  }
}

std::string Values::edited(int index) {
  for (Flat& flat : rank_.units[index].flats) {
    const Placement& rest = flat.rest().place;
    if (rank_.whole() == rest) continue;
    const Buffer& whole = find(flat.params, rank_.whole())->one();
    const int64_t begin = rank_.begin_of(rest, flat);
    Buffer& own = flat.rest().one();
    rank_.traffic.fetch(own, mem::Account::kParam);
    rank_.traffic.wait_read(own);
    const int64_t at =
        optim::first_edit(own.data(), own.dtype, whole.at(begin), whole.dtype, own.numel);
    rank_.traffic.let_go(own);
    for (const Slot& slot : flat.slots) {
      if (at >= 0 && begin + at < slot.offset + slot.numel) return slot.name;
    }
  }
  return "";
}

}  // namespace penstock::exec
