#include "src/exec/updates.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"
#include "src/exec/delta_base.h"
#include "src/exec/gradient_clipping.h"
#include "src/exec/residuals.h"
#include "src/optim/optimizer_step.h"

namespace penstock::exec {

namespace {

// Returns whether the move copies no bytes. A move between disk and host memory copies none: it
// hands over the buffer's memory to the new copy.
bool stays_in_memory(const std::vector<Move>& moves, const mem::Tiers& tiers) {
  if (moves.size() != 1 || moves[0].kind != MoveKind::kCopy) return false;
  const Tier other = moves[0].from == Tier::kDisk ? moves[0].to : moves[0].from;
  const bool disk = moves[0].from == Tier::kDisk || moves[0].to == Tier::kDisk;
  return disk && tiers.owner(other) == nullptr;
}

// Returns false for a parameter that has no second moment yet, so that it gets one.
bool keeps_second_moment(const Update& update, const Slot& slot) {
  return update.rules.keeps_second_moments && slot.squared > 0;
}

// Returns whether the publish is only a gather. It is if the masters are this rank's shards of the
// resting parameters.
bool gathers_masters(const Rank& rank, const std::vector<int>& units, const Route& way) {
  return way.passes.size() == 1 && way.passes[0].kind == PassKind::kAllGather &&
         std::all_of(units.begin(), units.end(), [&](int unit) {
           const std::vector<Flat>& flats = rank.units[unit].flats;
           return std::all_of(flats.begin(), flats.end(), [&](const Flat& flat) {
             return !flat.trainable || !rank.keeps_master(flat);
           });
         });
}

// Compares the gradients of parameters that all tensor ranks hold whole. The gradients are equal
// unless a rule is missing and each rank has only an addend. Each slot is compared once, in the
// first step in which it has a nonzero gradient. This may be later than step one: the gradient of a
// layer is zero if the next layer is initialized to zero.
void compare_replicas(Rank& rank, const Gradients& gradients, std::set<const Slot*>* compared) {
  const Groups& groups = rank.groups;
  if (rank.cells.grad_update.tier != Tier::kDevice) arrive_on_host(rank, gradients);
  std::vector<const Slot*> slots;
  std::vector<double> squares;
  std::vector<at::Tensor> there;       // sums of squares that are on the device
  std::vector<size_t> slots_of_there;  // their indices in `squares`
  for (UnitState& unit : rank.units) {
    for (Flat& flat : unit.flats) {
      if (!flat.trainable || flat.placement.on(Axis::kTensor).layout != Layout::kReplicated)
        continue;
      const Copy* copy = gradients.held(flat);
      const bool here = copy != nullptr && copy->one().memory;
      const int64_t begin = here ? rank.begin_of(copy->place, flat) : 0;
      for (const Slot& slot : flat.slots) {
        if (compared->contains(&slot)) continue;
        slots.push_back(&slot);
        const int64_t from = std::max(begin, slot.offset);
        const int64_t to =
            here ? std::min(begin + copy->one().numel, slot.offset + slot.numel) : from;
        squares.push_back(0.0);
        if (from >= to) continue;
        const device::Address values = copy->one().at(from - begin);
        if (values.device == nullptr) {
          squares.back() = device::host::sum_squares(values.host(), copy->one().dtype, to - from);
          continue;
        }
        there.push_back(device::exact_squares_on_device(values, copy->one().dtype, to - from));
        slots_of_there.push_back(squares.size() - 1);
      }
    }
  }
  if (slots.empty()) return;
  const std::vector<double> read = device::read(there);
  for (size_t i = 0; i < read.size(); ++i) squares[slots_of_there[i]] = read[i];
  const std::string mine(reinterpret_cast<const char*>(squares.data()), squares.size() * 8);
  const std::vector<std::string> all =
      rank.channels.stage().share("gradients alike", groups.stage(), mine);
  for (size_t other = 0; other < all.size(); ++other) {
    const int tensor = rank.mesh.coordinate(static_cast<int>(other), Axis::kTensor);
    // The tensor axis is innermost.
    const std::string& first = all[other - static_cast<size_t>(tensor)];
    for (size_t i = 0; i < slots.size(); ++i) {
      double one = 0.0, two = 0.0;
      std::memcpy(&one, first.data() + i * 8, sizeof(one));
      std::memcpy(&two, all[other].data() + i * 8, sizeof(two));
      if (two != 0.0) compared->insert(slots[i]);
      if (!(std::abs(one - two) > 1e-3 * std::max(one, two))) continue;
      throw RuntimeFault(concat(
          "[exec::norm] the gradient of \"", slots[i]->name, "\" is not the same on ranks ",
          groups.stage().ranks[other - static_cast<size_t>(tensor)], " and ",
          groups.stage().ranks[other],
          ", which compute one model together (mesh.tensor). Its layer computes with only a part "
          "of the values, for example some of the heads. Give the layer the style \"partial\" in "
          "\"parallel.rules\""));
    }
  }
}

}  // namespace

Updates::Updates(Rank& rank, Lanes& lanes, Gradients& gradients)
    : rank_(rank),
      lanes_(lanes),
      gradients_(gradients),
      norm_(rank, lanes, gradients),
      channel_(rank.group, "update") {
  channel_.recorder = rank.tiers.recorder;
}

void Updates::begin(Update update) {
  finish(false);
  update_ = std::move(update);
  scalars_ = {};
}

// The change runs on the lane, because updates of the previous step may still be queued there.
void Updates::set_step(int64_t step) {
  on_lane({}, [this, step] { channel_.set_step(step); });
}

void Updates::arrive() {
  for (UnitState& unit : rank_.units) {
    unit.param_ready.wait();
    for (Flat& flat : unit.flats) {
      if (!rank_.edits_cross(flat)) continue;
      const Buffer& rest = flat.rest().one();
      flat.left = device::fingerprint(rest.data(), rest.bytes());
    }
  }
}

void Updates::finish(bool for_host) {
  for (const UnitState& unit : rank_.units) unit.updated.wait();
  const bool comes_back = rank_.on_accelerator() && rank_.cells.updates_on_device() &&
                          rank_.cells.optim_rest.tier != Tier::kDevice;
  if (for_host && comes_back) rank_.tiers.computes.synchronize();
}

void Updates::on_lane(const std::vector<int>& units, std::function<void()> work) {
  if (rank_.cells.updates_on_device()) return work();
  const device::Fence done = lanes_.update.submit(std::move(work));
  for (const int unit : units) rank_.units[unit].updated = done;
}

// ---- the norm

void Updates::norm(const comm::Label& label) {
  Norm::Result made;
  while (made.divisor == 0.0) {
    gradients_.finish();
    rank_.traffic.settle();  // ends the writes of the previous step's last unit
    gradients_.complete();
    if (rank_.groups.tensor().size() > 1) compare_replicas(rank_, gradients_, &compared_);
    made = norm_.exchange(label, update_);
  }
  const auto& [total, divisor, bad, told] = made;
  seen_.told = told;
  if (!bad.empty() || !std::isfinite(total)) {
    discard();
    gradients_.discard();
    throw NonFinite(concat(
        "[exec::norm] the gradients are not finite. The weights are unchanged and the window "
        "was dropped. ",
        bad.empty() ? "Every contribution was finite, but their sum overflowed"
                    : "First seen: " + bad));
  }
  seen_.grad_norm = std::sqrt(total) / divisor;
  grad_scale_ = static_cast<float>(gradient_scale(divisor, seen_.grad_norm, update_.clip));
  bump_versions();
  if (update_.external) {
    prepare_external();
    update_.external();
  }
  Residuals(rank_).commit(update_.rules.whole_divisor / divisor);
}

// The user may have kept a graph with saved parameters, which change now. This call makes autograd
// raise its error for such a graph.
void Updates::bump_versions() {
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      for (Slot& slot : flat.slots) {
        if (slot.touched) slot.param.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

void Updates::prepare_external() {
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      const Copy* gradient = flat.trainable ? gradients_.held(flat) : nullptr;
      if (gradient == nullptr) continue;
      const Buffer& sum = gradient->one();
      const Tier tier = rank_.cells.optim_update.tier;
      flat.gradient32 = rank_.tiers.arena(tier).take(sum.numel * 4, mem::Account::kGrad);
      for (ChunkState& chunk : flat.chunks) {
        take_edits(flat, master_of(flat, chunk), chunk.begin, rank_.numel_updated(flat, chunk));
      }
      const device::Address out = flat.gradient32.data();
      device::take(out, Dtype::kFp32, sum.data(), sum.dtype, sum.numel, false);
      if (out.device == nullptr && sum.data().device != nullptr) rank_.tiers.computes.synchronize();
      device::scale(out, sum.numel, grad_scale_);
    }
  }
}

// ---- moves of optimizer state, from its resting place and back

void Updates::move(const PlannedStep& planned) {
  on_lane(planned.step.units, [this, planned] {
    if (planned.step.role == Role::kGrad) return gradients_.fetch(planned);
    for (const int unit : planned.step.units) {
      for (Flat& flat : rank_.units[unit].flats) {
        if (flat.trainable) move_state(flat, flat.chunks.at(planned.step.chunk.index), planned);
      }
    }
  });
}

void Updates::move_state(Flat& flat, ChunkState& chunk, const PlannedStep& planned) {
  const std::vector<Move>& moves = planned.step.moves;
  const Placement& at = rank_.cells.optim_update;
  const bool fetches = apply_all(chunk.optim.front().place, moves) == at;
  PENSTOCK_ASSERT(fetches == (chunk.optim.size() == 1) && (!fetches || chunk.optim.front().valid),
                  concat("[exec::move] the optimizer state is not where this plan line starts: ",
                         *planned.label.text));
  if (fetches) {
    // Starts all reads before any memory changes its owner, so that an error leaves the state
    // intact.
    for (Buffer& kept : chunk.optim.front().buffers)
      rank_.traffic.fetch(kept, mem::Account::kOptim);
    Copy away{at, {}, true};
    for (const Buffer& kept : chunk.optim.front().buffers) {
      Buffer& buffer = away.buffers.emplace_back();
      buffer.dtype = kept.dtype;
      buffer.tier = at.tier;
      if (kept.exists())
        buffer.numel = stays_in_memory(moves, rank_.tiers) ? kept.numel : rank_.numel_of(at, flat);
    }
    chunk.optim.push_back(std::move(away));
  }
  Copy& rest = chunk.optim.front();
  Copy& away = chunk.optim.back();
  Copy &from = fetches ? rest : away, &to = fetches ? away : rest;
  Walk walk = rank_.walk(from.place, moves, false);
  for (size_t i = 0; i < from.buffers.size(); ++i) {
    Buffer &source = from.buffers[i], &target = to.buffers[i];
    if (stays_in_memory(moves, rank_.tiers)) {
      target.memory = std::move(source.memory);
      target.moving = source.moving;
    } else if (source.exists()) {
      rank_.traffic.make_room(target, mem::Account::kOptim);
      walk.add(rank_.meshes.of(flat), {source.data(), target.data(), source.dtype, target.dtype,
                                       flat.numel, false, source.moving});
    }
  }
  if (!stays_in_memory(moves, rank_.tiers)) walk.run(channel_, planned.label);
  if (fetches) {  // a copy on disk stays valid until the update
    if (!stays_in_memory(moves, rank_.tiers))
      for (Buffer& kept : rest.buffers) {
        rank_.traffic.changes(kept);
        rank_.traffic.drop(kept);
      }
    rest.valid = rest.place.tier == Tier::kDisk;
  } else {
    for (Buffer& kept : rest.buffers) rank_.traffic.put_back(kept);
    rest.valid = true;
    chunk.optim.pop_back();
  }
}

void Updates::discard() {
  rank_.doubts.clear();
  for (UnitState& unit : rank_.units) {
    unit.updated.settle();
    for (Flat& flat : unit.flats) {
      for (ChunkState& chunk : flat.chunks) {
        if (chunk.optim.size() < 2 || !chunk.optim.front().valid) continue;
        for (Buffer& buffer : chunk.optim.back().buffers) {
          if (rank_.tiers.disk) rank_.tiers.disk->wait(buffer.moving);
        }
        chunk.optim.pop_back();
      }
    }
  }
}

// ---- the optimizer

std::pair<int64_t, int64_t> Updates::owned(const Flat& flat) const {
  const Placement& place = rank_.cells.optim_update;
  const int64_t begin = rank_.begin_of(place, flat);
  return {begin, begin + rank_.numel_of(place, flat)};
}

// Returns the address of an element in the resting parameters. `element` counts from the first
// element that this rank updates. The resting buffer may hold more elements than this rank updates.
device::Address Updates::rest_at(Flat& flat, int64_t element) const {
  return flat.rest().one().at(owned(flat).first - rank_.begin_of(flat.rest().place, flat) +
                              element);
}

void Updates::take_edits(Flat& flat, device::Address master, int64_t element, int64_t numel) const {
  if (!rank_.users_write(flat) || !flat.edited) return;
  const Buffer& rest = flat.rest().one();
  const at::Tensor seen = device::brought(rest_at(flat, element), rest.dtype, numel, master.device);
  exec::take_edits(rank_, flat, {device::address_of(seen, master.device), element, numel}, master);
}

device::Address Updates::master_of(Flat& flat, ChunkState& chunk) {
  if (rank_.keeps_master(flat)) return chunk.optim.back().buffers.front().data();
  return rest_at(flat, chunk.begin);
}

device::Address Updates::fetch_master(Flat& flat, ChunkState& chunk) {
  if (rank_.keeps_master(flat)) {
    Buffer& master = chunk.optim.back().buffers.front();
    rank_.traffic.fetch(master, mem::Account::kOptim);
    rank_.traffic.wait_read(master);
  }
  return master_of(flat, chunk);
}

void Updates::update(const PlannedStep& planned) {
  gradients_.finish();
  on_lane(planned.step.units, [this, units = planned.step.units, chunk = planned.step.chunk,
                               back = planned.writes_back, reduced = gradients_.last_move()] {
    if (!rank_.cells.updates_on_device()) reduced.wait_on_host();
    for (const int unit : units) update_unit(unit, chunk, back);
  });
}

void Updates::update_unit(int index, const Chunk& chunk, bool writes_back) {
  UnitState& unit = rank_.units[index];
  for (Flat& flat : unit.flats) {
    if (!flat.trainable) continue;
    ChunkState& state = flat.chunks.at(chunk.index);
    for (const Buffer& buffer : state.optim.back().buffers) rank_.traffic.wait_read(buffer);
    rank_.traffic.wait_read(state.gradient);
    tell_changes(flat, state);
    update_flat(flat, chunk, writes_back);
    if (state.optim.size() > 1) state.optim.front().valid = false;
    rank_.traffic.drop(state.gradient);
    if (!chunk.last()) continue;
    for (Slot& slot : flat.slots) {
      slot.updates += slot.touched ? 1 : 0;
      slot.squared += slot.touched && !keeps_second_moment(update_, slot) ? 1 : 0;
      slot.touched = false;
    }
    gradients_.clear(flat);
  }
  if (chunk.last()) unit.grads.clear();
  rank_.traffic.settle();  // ends the write of the previous chunk before this chunk's write begins
}

// Announces changes of state that rests in memory and is updated in place ([Note: Behind training's
// back]).
void Updates::tell_changes(const Flat& flat, const ChunkState& chunk) {
  if (chunk.optim.size() == 1) {
    for (const Buffer& buffer : chunk.optim.front().buffers) rank_.traffic.changes(buffer);
  }
  if (!rank_.keeps_master(flat)) rank_.traffic.changes(flat.rest().one());
}

void Updates::update_flat(Flat& flat, const Chunk& chunk, bool writes_back) {
  const bool used = std::any_of(flat.slots.begin(), flat.slots.end(),
                                [](const Slot& slot) { return slot.touched; });
  ChunkState& state = flat.chunks[chunk.index];
  const int64_t numel = rank_.numel_updated(flat, state);
  // Deltas are computed for all parameters, also for those that this step does not update.
  if (rank_.cells.base && numel > 0 && !update_.external) {
    take_edits(flat, master_of(flat, state), state.begin, numel);
  }
  if (!used || numel == 0) return;  // no rank has a gradient in this window
  const Copy* gradient = gradients_.held(flat);
  const Placement& wanted =
      rank_.cells.grads_in_chunks ? rank_.cells.grad_hold : rank_.cells.grad_update;
  PENSTOCK_ASSERT(gradient != nullptr && gradient->place == wanted,
                  concat("[exec::update] no plan line moved the gradient of ",
                         flat.slots.front().name, " to the optimizer's placement"));
  PENSTOCK_ASSERT(state.optim.back().place == rank_.cells.optim_update,
                  concat("[exec::update] no plan line moved the optimizer state of ",
                         flat.slots.front().name, " to the optimizer's placement"));
  const int64_t begin = owned(flat).first + state.begin, end = begin + numel;
  FlatUpdate update;
  // Neighbouring parameters with the same hyperparameters and step count are updated in one pass.
  const size_t num_slots = flat.slots.size();
  for (size_t first = 0; first < num_slots;) {
    const Slot& slot = flat.slots[first];
    size_t next = first + 1;
    while (next < num_slots && flat.slots[next].group == slot.group &&
           flat.slots[next].touched == slot.touched && flat.slots[next].updates == slot.updates &&
           flat.slots[next].squared == slot.squared) {
      ++next;
    }
    const int64_t from = std::max(begin, slot.offset);
    const int64_t to = std::min(end, next < num_slots ? flat.slots[next].offset : flat.numel);
    if (slot.touched && from < to) {
      add_run(update, flat, state, {from - begin, to - begin}, slot, writes_back);
      // The host publishes a run while it computes the next one.
      if (update.runs.back().range.device == nullptr) run(std::exchange(update, {}));
    }
    first = next;
  }
  run(update);
}

// `part` counts from the chunk's first element.
void Updates::add_run(FlatUpdate& update, Flat& flat, ChunkState& chunk,
                      std::pair<int64_t, int64_t> part, const Slot& slot, bool writes_back) {
  const int64_t begin = part.first;
  const Buffer& sum = rank_.cells.grads_in_chunks ? chunk.gradient : gradients_.held(flat)->one();
  const device::Address master = master_of(flat, chunk) + begin * 4;
  const device::Address grad = sum.at(&sum == &chunk.gradient ? begin : chunk.begin + begin);
  PENSTOCK_ASSERT(grad.device == master.device,
                  concat("[exec::update] the gradient of ", slot.name,
                         " is not in the memory that its optimizer works in"));
  optim::StepRun run;
  optim::Range& range = run.range;
  range.device = master.device;
  range.master = reinterpret_cast<float*>(master.data);
  range.grad_dtype = sum.dtype;
  range.grad = grad.data;
  range.numel = part.second - begin;
  range.moment_dtype = rank_.cells.optim_update.dtype;
  range.param_dtype = flat.rest().one().dtype;
  if (!update_.external && !rank_.cells.base) {
    take_edits(flat, master, chunk.begin + begin, range.numel);
  }
  Published out = writes_back && rank_.keeps_master(flat)
                      ? publish_from(rest_at(flat, chunk.begin + begin), range, master)
                      : Published{};
  range.param_out = out.written.data;
  const std::vector<Buffer>& state = chunk.optim.back().buffers;
  const auto moment = [&](size_t i) {
    const bool kept = state.size() > i && state[i].exists();
    return kept ? static_cast<void*>(state[i].at(begin).data) : nullptr;
  };
  run.moment1 = moment(1);
  run.moment2 = moment(2);
  run.group = static_cast<size_t>(slot.group);
  run.step = slot.updates + 1;
  run.keeps_second = keeps_second_moment(update_, slot);
  run.second_step = slot.squared + (run.keeps_second ? 0 : 1);
  update.runs.push_back(run);
  update.published.push_back(std::move(out));
}

void Updates::run(const FlatUpdate& update) {
  if (!update_.external) optim::run_optimizer(update_.groups, update.runs, grad_scale_, &scalars_);
  for (size_t i = 0; i < update.runs.size(); ++i) {
    const optim::Range& range = update.runs[i].range;
    const Published& out = update.published[i];
    if (update_.external && out.written) {
      const device::Address master{range.master, range.device};
      device::take(out.written, range.param_dtype, master, Dtype::kFp32, range.numel, false);
    }
    if (out.room) device::copy(out.rest, out.written, out.bytes);
  }
}

// Returns where the optimizer's pass writes the new parameters. This is the resting copy if it is
// in the same memory as the masters. Otherwise it is a buffer beside the masters, which is copied
// afterwards.
Updates::Published Updates::publish_from(device::Address rest, const optim::Range& range,
                                         device::Address master) {
  if (rest.device == master.device) return {rest, rest, {}};
  mem::Arena& arena = master.device == nullptr ? rank_.tiers.host : rank_.tiers.device;
  Published out{rest, {}, {}, range.numel * dtype_bytes(range.param_dtype)};
  out.room = arena.take(out.bytes, mem::Account::kParam);
  out.written = out.room.data();
  return out;
}

// ---- publishing

// Writes all parameters of the chunk to disk, including parameters that this step did not update.
void Updates::publish_to_disk(int unit, const Chunk& chunk) {
  for (Flat& flat : rank_.units[unit].flats) {
    if (!flat.trainable) continue;
    rank_.traffic.drop(flat.rest().one());  // a read may have left old values in memory
    ChunkState& state = flat.chunks.at(chunk.index);
    rank_.traffic.make_room(state.param, mem::Account::kParam);
    if (!state.param.exists()) continue;
    device::take(state.param.data(), state.param.dtype, master_of(flat, state), Dtype::kFp32,
                 state.numel, false);
    rank_.traffic.put_back(state.param);
  }
}

// [Note: Three publishes] Parameters that rest on disk are written by the update lane, chunk by
// chunk. For other parameters there are two cases. (1) The optimizer has already done the first
// pass of the route (`joined`), or the masters are shards of the resting parameters (`in_window`).
// Then the gather lane waits for the update's fence and runs the remaining passes. If masters stay
// in place after the update, the gather lane also sends their deltas ([Note: Deltas]), but runs all
// passes. (2) Otherwise the update lane runs the whole route on its own channel.
void Updates::publish(const PlannedStep& planned) {
  const std::vector<int>& units = planned.step.units;
  if (rank_.cells.publishes_chunks) {
    return on_lane(units, [this, step = planned.step] {
      for (const int unit : step.units) publish_to_disk(unit, step.chunk);
    });
  }
  auto walk = std::make_shared<Walk>(rank_.walk(rank_.table.master(), planned.step.moves, false));
  const bool joined = joins_update(rank_.table, walk->route());
  const bool stays = rank_.cells.base && rank_.cells.optim_rest == rank_.cells.optim_update;
  const bool in_window = gathers_masters(rank_, units, walk->route());
  std::vector<device::Fence> updated;
  for (const int unit : units) updated.push_back(rank_.units[unit].updated);
  const auto pack = [this, walk, units, joined] {
    for (const int unit : units) {
      for (Flat& flat : rank_.units[unit].flats) {
        if (!flat.trainable || (!rank_.keeps_master(flat) && walk->route().local())) continue;
        Buffer& rest = flat.rest().one();
        if (!rank_.keeps_master(flat)) rank_.traffic.changes(rest);
        rank_.traffic.make_room(rest, mem::Account::kParam);
        const device::Address from =
            joined ? device::Address() : master_of(flat, flat.chunks.front());
        walk->add(rank_.meshes.of(flat), {from, rest.data(), Dtype::kFp32, rest.dtype, flat.numel});
      }
    }
  };
  if (joined || in_window || stays) {
    if (walk->route().local()) return;
    pack();
    const size_t first = joined ? 1 : 0;
    const device::Fence ready =
        lanes_.gather.submit([this, walk, units, updated, label = planned.label, first,
                              turn = lanes_.take_turn(*walk, first)] {
          for (const device::Fence& update : updated) update.wait();
          walk->run(rank_.channels.gather, label, first, turn.get());
          renew_base(rank_, units);
        });
    for (const int unit : units) rank_.units[unit].param_ready = ready;
    return;
  }
  on_lane(units, [this, walk, pack, units, label = planned.label] {
    pack();
    walk->run(channel_, label);
    renew_base(rank_, units);
    for (const int unit : units) {
      for (Flat& flat : rank_.units[unit].flats) {
        if (flat.trainable) rank_.traffic.put_back(flat.rest().one());
      }
    }
  });
}

// ---- views for a user's optimizer

template <class View>
void Updates::for_each_piece(const View& view) {
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      if (!flat.trainable) continue;
      const auto [begin, end] = owned(flat);
      for (const Slot& slot : flat.slots) {
        const int64_t from = std::max(begin, slot.offset);
        const int64_t to = std::max(from, std::min(end, slot.offset + slot.numel));
        view(flat, slot, from - begin, to - from);
      }
    }
  }
}

std::vector<ShardView> Updates::shard_views() {
  finish();
  std::vector<ShardView> views;
  for_each_piece([&](Flat& flat, const Slot& slot, int64_t from, int64_t numel) {
    const device::Address master = master_of(flat, flat.chunks.front()) + from * 4;
    views.push_back({slot.name, slot.param, device::view(master, Dtype::kFp32, numel),
                     owned(flat).first + from - slot.offset});
  });
  return views;
}

std::vector<at::Tensor> Updates::shard_gradients() {
  std::vector<at::Tensor> gradients;
  for_each_piece([&](Flat& flat, const Slot& slot, int64_t from, int64_t numel) {
    at::Tensor& gradient = gradients.emplace_back();
    if (!slot.touched) return;
    gradient = device::view(flat.gradient32.data() + from * 4, Dtype::kFp32, numel);
  });
  return gradients;
}

}  // namespace penstock::exec
