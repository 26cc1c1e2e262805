#include "src/exec/gradients.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"
#include "src/exec/residuals.h"

namespace penstock::exec {

namespace {

// A gradient with at least this many elements is copied to its flat by a call of its own.
constexpr int64_t kAlone = int64_t{1} << 20;

// Each large gradient is copied by a call of its own, and its memory is then freed. One call copies
// the other gradients of a flat.
void pack_into(const Buffer& sum, Flat& flat) {
  if (flat.unpacked.empty()) return;
  const device::Unseen unseen;
  std::array<std::vector<at::Tensor>, 2> into, from;  // by Unpacked::adds
  for (const auto& [slot, gradient, adds] : std::exchange(flat.unpacked, {})) {
    into[adds ? 1 : 0].push_back(device::view(sum.at(slot->offset), sum.dtype, slot->numel));
    from[adds ? 1 : 0].push_back(gradient.reshape({-1}));
  }
  if (!into[0].empty()) at::_foreach_copy_(into[0], from[0]);
  if (!into[1].empty()) at::_foreach_add_(into[1], from[1]);
}

// `number` is the number of the backward in its window ([Note: Noise]).
uint64_t noise_of(const Flat& flat, int64_t number) {
  const uint64_t seed = hash_text({reinterpret_cast<const char*>(&number), sizeof(number)});
  return hash_text(flat.slots.front().name, seed);
}

// Returns the values of a copy of the flat's gradient that this rank counts: their address and
// number.
std::pair<device::Address, int64_t> counted(const Rank& rank, const Flat& flat, const Copy& copy) {
  const Mesh& mesh = rank.meshes.of(flat).mesh;
  int64_t numel = copy.one().numel, begin = 0;
  for (const Axis axis : {Axis::kLocal, Axis::kNode}) {  // [Note: Shard order]
    if (copy.place.on(axis) != Layout::kReplicated) continue;
    numel /= mesh.size(axis);
    begin += mesh.coordinate(rank.group.rank(), axis) * numel;
  }
  return {copy.one().at(begin), numel};
}

}  // namespace

void add_up(const Channels::Addends& over, device::Address addends, Dtype dtype, int64_t numel,
            const comm::Label& label) {
  const Members& ranks = over.ranks;
  if (ranks.size() == 1) return;
  const bool on_host = addends.device == nullptr;
  const int64_t scratch = numel / ranks.size() * (ranks.size() - (on_host ? 1 : 0));
  const at::TensorOptions where = on_host ? at::kCPU : addends.device->where();
  const at::Tensor room = at::empty({scratch}, where.dtype(device::scalar_type(dtype)));
  comm::ReduceBuffer buffer;
  buffer.partial = addends;
  buffer.scratch = device::address_of(room, addends.device);
  buffer.dtype = buffer.result_dtype = dtype;
  buffer.numel = numel;
  over.channel.all_reduce(label, ranks, {buffer});
}

void arrive_on_host(Rank& rank, const Gradients& gradients) {
  if (!rank.on_accelerator()) return;
  gradients.last_move().wait_on_host();
  rank.tiers.computes.synchronize();  // gradients that no lane has moved
}

// Returns the copy that backwards add to. If it does not exist, makes it with memory.
Copy& Gradients::sum_of(Flat& flat) {
  const Placement& made = rank_.table.grad_after_backward();
  Copy* sum = find(flat.grads, made);
  if (sum != nullptr) return *sum;
  for (Slot& slot : flat.slots) slot.written = false;
  flat.summed_since = backward_;
  Copy& opened = rank_.open(flat.grads, made, flat, mem::Account::kGrad);
  // On a device, it is faster to zero the whole buffer in one pass here than each gap between
  // parameters. So complete() has nothing to zero.
  const Buffer& buffer = opened.one();
  if (buffer.data().device != nullptr) device::zero(buffer.data(), buffer.bytes());
  return opened;
}

// Sums over several backwards are fp32. If the table was made for one backward, the low-precision
// gradient is widened when a second backward adds to it. A gradient on disk keeps its dtype,
// because its extent has a fixed size.
void Gradients::widen(Copy& copy) {
  Buffer& sum = copy.one();
  if (sum.dtype == Dtype::kFp32 || sum.on_disk()) return;
  Buffer wide;
  wide.numel = sum.numel;
  wide.tier = sum.tier;
  rank_.traffic.make_room(wide, mem::Account::kGrad);
  device::take(wide.data(), wide.dtype, sum.data(), sum.dtype, sum.numel, false);
  sum = std::move(wide);
}

Copy& Gradients::zeros_at(const Placement& place, Flat& flat) {
  Copy& copy = rank_.open(flat.grads, place, flat, mem::Account::kGrad);
  device::zero(copy.one().data(), copy.one().bytes());
  return copy;
}

void Gradients::pack(UnitState& unit) {
  for (Flat& flat : unit.flats) {
    if (!flat.unpacked.empty()) pack_into(sum_of(flat).one(), flat);
  }
}

bool Gradients::take(int unit, int flat_index, int slot_index, const at::Tensor& gradient) {
  UnitState& state = rank_.units[unit];
  Flat& flat = state.flats[flat_index];
  Slot& slot = flat.slots[slot_index];
  if (gradient.layout() != at::kStrided) {
    throw RuntimeFault(concat("[exec::take_gradient] parameter \"", slot.name,
                              "\" has a sparse gradient, which is not supported. Build the "
                              "embedding with sparse=False"));
  }
  state.updated.wait();
  Copy& copy = sum_of(flat);
  // If a plan line moves the gradient, it keeps the dtype that the line expects.
  if (flat.summed_since != backward_ && copy.place == rank_.cells.grad_update) {
    widen(copy);
  }
  const Buffer& sum = copy.one();
  state.grads.make(rank_.table.grad_after_backward());
  const at::Tensor dense = gradient.contiguous();
  const Dtype from = dtype_of(dense.scalar_type());
  if (sum.data().device != nullptr && slot.numel < kAlone) {
    const bool again = std::any_of(flat.unpacked.begin(), flat.unpacked.end(),
                                   [&](const Unpacked& one) { return one.slot == &slot; });
    if (again) pack_into(sum, flat);
    flat.unpacked.push_back({&slot, dense, slot.written});
    slot.written = slot.touched = slot.had = true;
    return true;
  }
  const bool finite = device::take_checked(sum.at(slot.offset), sum.dtype,
                                           device::address_of(dense, &rank_.tiers.computes), from,
                                           slot.numel, slot.written);
  slot.written = slot.touched = slot.had = true;
  slot.bad |= !finite;
  return finite;
}

// Returns the placement from which a move starts, since moves do not name it. The book of copies is
// ambiguous for a late gradient, because an earlier gradient of the unit has already made the same
// move. So the table's cells give the placement.
Placement Gradients::begin_of(const std::vector<Move>& moves) const {
  const Placement& made = rank_.table.grad_after_backward();
  const Placement& held = rank_.cells.grad_hold;
  return made != held && apply_all(made, moves) == held ? made : held;
}

void Gradients::run(const PlannedStep& planned, bool late) {
  finish();  // at most one move is on the lane, which bounds the buffers in flight
  const std::vector<Move>& moves = planned.step.moves;
  const Placement& made = rank_.table.grad_after_backward();
  const Placement from = begin_of(moves);
  auto walk = std::make_shared<Walk>(rank_.walk(from, moves));
  const Placement to = walk->route().to;
  for (const int index : planned.step.units) {
    UnitState& unit = rank_.units[index];
    unit.updated.wait();
    unit.grads.make(from);
    unit.grads.move(moves, from);
    for (Flat& flat : unit.flats) {
      if (!flat.trainable) continue;
      if (!flat.unpacked.empty()) pack_into(sum_of(flat).one(), flat);
      flat.grads.reserve(flat.grads.size() + 3);  // so that pointers into the vector stay valid
      Copy* source = from == made ? &sum_of(flat) : find(flat.grads, from);
      // If this rank has no contribution, it takes part in the sum with zeros.
      if (source == nullptr && late) source = &zeros_at(from, flat);
      PENSTOCK_ASSERT(source != nullptr,
                      concat("[exec::move] there is no gradient for `", *planned.label.text, "`"));
      if (from == made) close(flat, source->one());
      if (late && from == made) sum_late(flat, source->one(), planned.label);
      rank_.traffic.fetch(source->one(), mem::Account::kGrad);
      const Buffer& start = source->one();
      Copy* sum = find(flat.grads, to);
      const bool adds = sum != nullptr;
      if (adds) {
        if (sum->one().tier != Tier::kDevice) done_.wait_on_host();  // widen() reads it on the host
        widen(*sum);
        rank_.traffic.fetch(sum->one(), mem::Account::kGrad);
        rank_.traffic.wait_read(sum->one());
      } else if (walk->route().in_place() && to.tier != Tier::kDisk) {
        flat.grads.push_back({to, {}, true});
        sum = &flat.grads.back();
        sum->buffers.push_back(rank_.buffer_at(to, flat));
        sum->one().memory = std::move(source->one().memory);
      } else {
        sum = &rank_.open(flat.grads, to, flat, mem::Account::kGrad);
      }
      const device::Address data = start.memory ? start.data() : sum->one().data();
      flat.uncount();
      mem::Lease old;
      const Travel::Fed residual = Residuals(rank_).begin(flat, walk->route(), &old);
      walk->add(rank_.meshes.of(flat),
                {data, sum->one().data(), start.dtype, sum->one().dtype, flat.numel, adds,
                 start.moving, &flat.squares, &flat.norm_there, noise_of(flat, number_), residual});
      moved_.push_back({&flat, to, std::move(source->one().memory), start.moving, std::move(old)});
      source->valid = false;
      std::erase_if(flat.grads, [](const Copy& c) { return !c.valid && !c.one().on_disk(); });
    }
  }
  walk->ready();
  submit(walk, planned.label);
}

void Gradients::submit(const std::shared_ptr<Walk>& walk, const comm::Label& label) {
  walk_ = walk;
  done_ = lanes_.reduce.submit(
      [&to = rank_.channels.reduce, walk, label, turn = lanes_.take_turn(*walk)] {
        walk->run(to, label, 0, turn.get());
      });
}

void Gradients::sum(const PlannedStep& planned) {
  finish();
  const Axis axis = planned.step.moves.front().axes.front();
  const Placement& made = rank_.table.grad_after_backward();
  for (const int index : planned.step.units) {
    UnitState& unit = rank_.units[index];
    unit.updated.wait();
    for (Flat& flat : unit.flats) {
      if (!flat.trainable || !flat.placement.is_partial(axis)) continue;
      if (!flat.unpacked.empty()) pack_into(sum_of(flat).one(), flat);
      flat.grads.reserve(flat.grads.size() + 1);
      // A copy on disk already has the sum of earlier backwards, and the sum of this backward is
      // added to it later.
      Copy* copy = rank_.cells.grads_on_disk ? &sum_of(flat) : held(flat);
      // If this rank has no contribution, it takes part in the sum with zeros.
      if (copy == nullptr) copy = &zeros_at(rank_.cells.grad_update, flat);
      unit.grads.make(copy->place);
      if (copy->place == made) flat.complete(copy->one());
      add_up(flat, copy->one(), axis, planned.label);
      if (!rank_.cells.grads_on_disk) flat.summed *= flat.placement.num_holders(axis, rank_.mesh);
    }
  }
}

// Divides each sum by the number of its addends, so each rank again has one addend of the same sum.
void Gradients::reopen() {
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      const int addends = std::exchange(flat.summed, 1);
      if (addends == 1) continue;
      Buffer& sum = held(flat)->one();
      const at::Tensor values = device::view(sum.data(), sum.dtype, sum.numel);
      values.div_(addends);
      flat.uncount();
    }
  }
}

// Sums a late gradient over the model axes if the `sum` line of the plan has run already.
void Gradients::sum_late(Flat& flat, Buffer& sum, const comm::Label& label) {
  if (!rank_.cells.grads_on_disk && flat.summed == 1) return;
  for (const Axis axis : kModelAxes) {
    if (flat.placement.is_partial(axis)) add_up(flat, sum, axis, label);
  }
}

// Adds up a flat's gradient over the ranks that hold the flat along the axis.
void Gradients::add_up(Flat& flat, Buffer& sum, Axis axis, const comm::Label& label) {
  flat.uncount();
  if (sum.data().device == nullptr) arrive_on_host(rank_, *this);
  const auto turn = sum.data().device != nullptr ? lanes_.take_turn() : nullptr;
  if (turn != nullptr) turn->wait();
  exec::add_up(rank_.channels.addends(flat, axis), sum.data(), sum.dtype, sum.numel, label);
}

// Ends a sum of this rank's backwards, to which no backward will add any more. On a device, take()
// does not check values, so the sum of all values is kept there as a scalar. The norm reads the
// scalar to find values that are not finite.
void Gradients::close(Flat& flat, Buffer& sum) {
  flat.complete(sum);
  if (flat.placement.num_summed() > 1) {
    device::view(sum.data(), sum.dtype, sum.numel).div_(flat.placement.num_summed());
  }
  if (sum.data().device == nullptr) return;
  const at::Tensor total = device::sum_on_device(sum.data(), sum.dtype, sum.numel);
  flat.sum_there = flat.sum_there.defined() ? flat.sum_there.add(total) : total;
}

void Gradients::finish() {
  if (moved_.empty()) return;
  for (const Moved& moved : moved_) {  // the lane may have failed before it waited for the reads
    if (rank_.tiers.disk) rank_.tiers.disk->wait(moved.arriving);
  }
  try {
    done_.wait();
  } catch (...) {  // the error is reported once
    moved_.clear();
    walk_.reset();
    throw;
  }
  if (rank_.cells.grad_hold.tier == Tier::kDisk) {
    done_.wait_on_host();
    rank_.traffic.settle();
  }
  for (Moved& moved : moved_) put_back(*moved.flat, *find(moved.flat->grads, moved.to));
  moved_.clear();
  walk_.reset();
}

// Writes a gradient to disk. The sum of squares is computed first, while the gradient is in memory.
void Gradients::put_back(Flat& flat, Copy& copy) {
  if (!copy.one().on_disk()) return;
  if (!flat.norm_there.defined()) flat.squares = own_squares(flat, &copy, nullptr);
  rank_.traffic.put_back(copy.one());
}

Copy* Gradients::held(Flat& flat) const {
  for (Copy& copy : flat.grads) {
    if (copy.valid) return &copy;
  }
  return nullptr;
}

void Gradients::complete() {
  const Placement& made = rank_.table.grad_after_backward();
  if (made.partial()) return;  // a move completes the sum before it is used
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      Copy* sum = find(flat.grads, made);
      const bool only_zeros =
          held(flat) == nullptr && std::any_of(flat.slots.begin(), flat.slots.end(),
                                               [](const Slot& slot) { return slot.touched; });
      if (only_zeros) {
        sum = &sum_of(flat);
        unit.grads.make(made);
      }
      if (sum != nullptr) flat.complete(sum->one());
    }
  }
}

double Gradients::own_squares(Flat& flat, const Copy* copy, std::vector<at::Tensor>* there) const {
  if (copy == nullptr) return 0.0;
  if (!rank_.counts(flat)) return 0.0;
  if (!(flat.squares < 0.0)) return flat.squares;
  if (flat.norm_there.defined()) {
    there->push_back(flat.norm_there);
    return 0.0;
  }
  const Buffer& sum = copy->one();
  PENSTOCK_ASSERT(sum.memory, concat("[exec::norm] the gradient of ", flat.slots.front().name,
                                     " left memory before its squares were summed"));
  const auto [at, numel] = counted(rank_, flat, *copy);
  if (at.device != nullptr) {
    there->push_back(device::norm_on_device(at, sum.dtype, numel));
    return 0.0;
  }
  return device::host::sum_squares(at.host(), sum.dtype, numel);
}

double Gradients::exact_squares(Flat& flat) {
  const Copy* copy = held(flat);
  if (copy == nullptr || !copy->one().memory) return std::numeric_limits<double>::infinity();
  const Dtype dtype = copy->one().dtype;
  const auto [at, numel] = counted(rank_, flat, *copy);
  if (at.device == nullptr) return device::host::sum_squares(at.host(), dtype, numel);
  return device::read({device::exact_squares_on_device(at, dtype, numel)}).front();
}

void Gradients::clear(Flat& flat) {
  for (Copy& copy : flat.grads) {
    rank_.traffic.drop(copy.one());
    copy.valid = false;
  }
  for (ChunkState& chunk : flat.chunks) rank_.traffic.drop(chunk.gradient);
  flat.unpacked.clear();
  std::erase_if(flat.grads, [](const Copy& copy) { return !copy.one().on_disk(); });
  Residuals::drop(flat);
  flat.gradient32.reset();
  flat.summed = 1;
  flat.uncount();
  flat.sum_there.reset();
}

void Gradients::discard() {
  for (const UnitState& unit : rank_.units) unit.updated.settle();
  finish();
  for (UnitState& unit : rank_.units) {
    unit.grads.clear();
    for (Flat& flat : unit.flats) {
      clear(flat);
      for (Slot& slot : flat.slots) slot.written = slot.touched = slot.bad = false;
    }
  }
}

void Gradients::leave_zeros(bool leaves) {
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      for (Slot& slot : flat.slots) {
        if (leaves) slot.touched = slot.had;
        slot.had = leaves && slot.had;
      }
    }
  }
}

bool Gradients::late(int unit) const {
  const Placement& made = rank_.table.grad_after_backward();
  const std::vector<Flat>& flats = rank_.units[unit].flats;
  return std::any_of(flats.begin(), flats.end(),
                     [&](const Flat& flat) { return find(flat.grads, made) != nullptr; });
}

bool Gradients::takes_away(const std::vector<Move>& moves) const {
  return apply_all(begin_of(moves), moves) != rank_.table.grad_after_backward();
}

void Gradients::set(int unit, int flat_index, int slot_index, const at::Tensor& full,
                    double factor) {
  finish();
  UnitState& state = rank_.units[unit];
  Flat& flat = state.flats[flat_index];
  Slot& slot = flat.slots[slot_index];
  slot.touched = slot.had = true;
  slot.bad = false;
  Copy* copy = held(flat);
  if (copy == nullptr) {  // no backward contributed to this unit
    copy = &sum_of(flat);
    state.grads.make(copy->place);
  }
  const bool made = copy->place == rank_.table.grad_after_backward();
  slot.written |= made;
  // If the values are added up over model axes later, each rank gets an equal addend.
  const bool open = made || !rank_.cells.grads_on_disk;
  if (made) factor *= flat.placement.num_summed();
  write(flat, *copy, slot, full, factor / (open ? flat.placement.num_addends(rank_.mesh) : 1));
}

void Gradients::write(Flat& flat, Copy& copy, const Slot& slot, const at::Tensor& full,
                      double factor) {
  Buffer& sum = copy.one();
  const int64_t begin = rank_.begin_of(copy.place, flat);
  const int64_t from = std::max(begin, slot.offset);
  const int64_t to = std::min(begin + sum.numel, slot.offset + slot.numel);
  if (from >= to) return;
  flat.uncount();
  rank_.traffic.fetch(sum, mem::Account::kGrad);
  rank_.traffic.wait_read(sum);
  // A device's copy to this memory may still be queued.
  if (sum.data().device == nullptr) arrive_on_host(rank_, *this);
  const at::Tensor part = full.reshape({-1}).narrow(0, from - slot.offset, to - from).mul(factor);
  device::take(sum.at(from - begin), sum.dtype, device::address_of(part, &rank_.tiers.computes),
               Dtype::kFp32, to - from, false);
  put_back(flat, copy);
}

void Gradients::forget(Flat& flat, Slot& slot) {
  finish();
  const at::Tensor zeros = at::zeros({slot.numel}, at::TensorOptions(at::kFloat));
  for (Copy& copy : flat.grads) {
    if (copy.valid) write(flat, copy, slot, zeros, 1.0);
  }
  slot.written = slot.touched = slot.had = slot.bad = false;
}

void Gradients::fetch(const PlannedStep& planned) {
  for (const int unit : planned.step.units) {
    for (Flat& flat : rank_.units[unit].flats) {
      if (flat.trainable && held(flat) != nullptr) {
        rank_.traffic.fetch(flat.chunks.at(planned.step.chunk.index).gradient, mem::Account::kGrad);
      }
    }
  }
}

}  // namespace penstock::exec
