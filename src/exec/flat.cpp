#include "src/exec/flat.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/device.h"
#include "src/device/kernels.h"
#include "src/device/torch_compat.h"

namespace penstock::exec {

namespace {

constexpr int64_t kAlignBytes = 64;  // alignment of each parameter, for vector loads
constexpr int64_t kShardBytes = 512;
// A fingerprint covers kRuns groups of kRun neighbouring values, because one memory access loads
// several values.
constexpr int64_t kRuns = 32, kRun = 8;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Hashes groups of neighbouring values at equal distances; `turn` chooses the first group. Returns
// 0 if the values are on a device, where a read would block.
uint64_t print_of(const Slot& slot, int64_t element_bytes, int64_t turn) {
  c10::StorageImpl* storage = slot.window.unsafeGetStorageImpl();
  if (!storage->device().is_cpu() || slot.numel == 0) return 0;
  const auto* values = static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get());
  const int64_t distance = std::max(kRun, (slot.numel + kRuns - 1) / kRuns);
  uint64_t hash = 1;
  for (int64_t run = turn * kRun % distance; run < slot.numel; run += distance) {
    const int64_t end = std::min(run + kRun, slot.numel);
    for (int64_t at = run; at < end; ++at) {
      uint32_t bits = 0;
      std::memcpy(&bits, values + at * element_bytes, static_cast<size_t>(element_bytes));
      hash = (hash ^ bits) * 0x9E3779B97F4A7C15ULL;
      hash ^= hash >> 29;
    }
  }
  return hash | 1;
}

}  // namespace

Dtype dtype_of(at::ScalarType type) {
  if (const std::optional<Dtype> dtype = device::find_dtype(type)) return *dtype;
  throw RuntimeFault(concat("[exec::dtype_of] dtype ", at::toString(type),
                            " is not supported; use float32, bfloat16 or float16"));
}

void Flat::add(const Slot& described, const std::string& unit) {
  Slot slot = described;
  if (slot.sizes.empty()) slot.sizes = slot.whole = slot.param.sizes().vec();
  slot.numel = c10::multiply_integers(slot.sizes);
  slot.room = std::max(slot.room, slot.numel);
  slot.window = slot.param.storage();
  // Offsets count `room` and not `numel`, so that they are equal on all tensor ranks.
  if (!slots.empty()) {
    slot.offset = round_up(slots.back().offset + slots.back().room, kAlignBytes / element_bytes());
  }
  slot.guard = concat(
      "[exec::guard] parameter \"", slot.name, "\" is sharded and its unit \"", unit,
      "\" is not running, so this rank does not have its values. Read it inside the module that "
      "owns it, or inside `with engine.gathered():`. If a loss needs it, call backward there, "
      "too.");
  slots.push_back(slot);
}

void Flat::seal(int num_ranks) {
  const int64_t used = slots.back().offset + slots.back().room;
  numel = round_up(std::max<int64_t>(used, 1), num_ranks * kShardBytes / element_bytes());
}

// [Note: Whole layout] A shard of a flat in the whole layout has whole parameters, so an optimizer
// that looks at whole tensors works on shards. Each parameter, the largest first, goes to the shard
// with the fewest elements of this flat, and among these to the one with the fewest of all flats.
// The largest shard decides the size of all.
void Flat::seal_whole(int num_ranks, std::vector<int64_t>& loads) {
  const int64_t align = kAlignBytes / element_bytes();
  std::vector<size_t> order(slots.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return slots[a].room > slots[b].room; });
  std::vector<int64_t> used(loads.size(), 0);
  std::vector<size_t> shard(slots.size());
  for (const size_t slot : order) {
    size_t best = 0;
    for (size_t other = 1; other < loads.size(); ++other) {
      if (std::pair(used[other], loads[other]) < std::pair(used[best], loads[best])) best = other;
    }
    shard[slot] = best;
    slots[slot].offset = used[best];
    used[best] = round_up(used[best] + slots[slot].room, align);
    loads[best] += slots[slot].room;
  }
  const int64_t largest = std::max<int64_t>(1, *std::max_element(used.begin(), used.end()));
  const auto num_shards = static_cast<int64_t>(loads.size());
  const int64_t size = round_up(largest, num_ranks / num_shards * kShardBytes / element_bytes());
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    slots[slot].offset += static_cast<int64_t>(shard[slot]) * size;
  }
  std::stable_sort(slots.begin(), slots.end(),
                   [](const Slot& a, const Slot& b) { return a.offset < b.offset; });
  numel = size * num_shards;
}

// See [Note: Windows]. The storage keeps its nbytes, so shapes and views of a freed parameter work.
void Flat::point(Slot& slot, device::Address base) {
  c10::StorageImpl* storage = slot.window.unsafeGetStorageImpl();
  char* data = base ? base.data + slot.offset * element_bytes() : nullptr;
  storage->set_data_ptr_noswap(c10::DataPtr(data, storage->device()));
  if (!base) return device::set_guard(*storage, slot.guard);
  device::clear_guard(*storage);
  slot.version = slot.param._version();
  renew_print(slot);
}

void Flat::renew_print(Slot& slot) { slot.print = print_of(slot, element_bytes(), attached); }

bool Flat::print_differs(const Slot& slot) const {
  return slot.print != 0 && print_of(slot, element_bytes(), attached) != slot.print;
}

void Flat::attach(device::Address base) {
  ++attached;
  for (Slot& slot : slots) point(slot, base);
}

void Flat::detach() {
  for (Slot& slot : slots) point(slot, nullptr);
}

void Flat::let_go(Slot& slot, const device::Device& computes) {
  c10::StorageImpl* storage = slot.window.unsafeGetStorageImpl();
  void* data = storage->_mutable_data_ptr_no_checks().get();
  if (data == nullptr) return;
  const c10::DeviceGuard guard(storage->device());
  c10::DataPtr own = c10::GetAllocator(storage->device_type())->allocate(storage->nbytes());
  const device::Device* there = storage->device().is_cpu() ? nullptr : &computes;
  device::copy({own.get(), there}, {data, there}, static_cast<int64_t>(storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(own));
}

void Flat::say_gone() {
  for (Slot& slot : slots) {
    slot.guard = concat("[exec::guard] parameter \"", slot.name,
                        "\" has no values: its engine was closed without gathering them");
  }
}

void Flat::let_params_go() {
  if (params.empty()) return;
  const Buffer& kept = rest().one();
  // Before commit() a parameter may still have its own memory. Only pointers into the flat are
  // cleared.
  const char* begin = kept.data().data;
  for (Slot& slot : slots) {
    c10::StorageImpl* storage = slot.window.unsafeGetStorageImpl();
    const auto* data = static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get());
    const bool window = data == nullptr || (data >= begin && data < begin + kept.bytes());
    if (!window) continue;
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    device::set_guard(*storage, slot.guard);
  }
}

void Flat::complete(Buffer& sum) {
  const int64_t size = dtype_bytes(sum.dtype);
  if (sum.data().device != nullptr) {
    for (Slot& slot : slots) slot.written = true;
    return;
  }
  // Zeroes everything between the slots that were written.
  int64_t done = 0;
  for (Slot& slot : slots) {
    const int64_t begin = slot.written ? slot.offset : slot.offset + slot.numel;
    device::zero(sum.at(done), (begin - done) * size);
    done = slot.offset + slot.numel;
    slot.written = true;
  }
  device::zero(sum.at(done), (numel - done) * size);
}

void Flat::free() {
  params.clear();
  grads.clear();
  chunks.clear();
  residual = {};
  base = {};
  gradient32.reset();
  norm_there.reset();
  sum_there.reset();
}

std::vector<Part> UnitState::parts() {
  std::vector<Part> all;
  for (Flat& flat : flats) all.push_back({&flat, true});
  for (Flat& flat : away) all.push_back({&flat, false});
  std::sort(all.begin(), all.end(),
            [](const Part& a, const Part& b) { return a.flat->number < b.flat->number; });
  return all;
}

bool UnitState::trainable() const {
  return std::any_of(flats.begin(), flats.end(), [](const Flat& flat) { return flat.trainable; });
}

}  // namespace penstock::exec
