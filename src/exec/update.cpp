// The executor's update section: global norm, optimizer, publishing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/exec/executor.h"
#include "src/optim/kernels.h"

namespace penstock::exec {

namespace {

constexpr size_t kBadBytes = 256;  // of the text that names a non-finite contribution

}  // namespace

void Executor::begin_update(Update update) {
  finish_updates();
  update_ = std::move(update);
}

void Executor::finish_updates() {
  for (const UnitState& unit : units_) unit.updated.wait();
}

// The optimizer works where its `update` cell is.
void Executor::on_update_lane(const std::vector<int>& units, std::function<void()> work) {
  if (table_.at(Role::kOptim, Phase::kUpdate).tier == Tier::kDevice) return work();
  const Event done = update_lane_.submit(std::move(work));
  for (const int unit : units) units_[unit].updated = done;
}

std::pair<int64_t, int64_t> Executor::owned(const Flat& flat) const {
  const Placement& place = table_.at(Role::kOptim, Phase::kUpdate);
  const int64_t numel = flat.numel / num_shards(place, mesh_);
  const int64_t begin = shard_index(place, mesh_, group_.rank()) * numel;
  return {begin, begin + numel};
}

int64_t Executor::reduced_element_bytes(const Flat& flat) const {
  const auto [begin, end] = owned(flat);
  const bool stored = flat.reduced.on_disk();
  return (stored ? flat.reduced.bytes : flat.reduced.memory.bytes()) / (end - begin);
}

float* Executor::master_of(Flat& flat, ChunkState& state) {
  if (!shares_master(flat)) return reinterpret_cast<float*>(state.master.data());
  auto* rest = reinterpret_cast<float*>(flat.rest.data());
  const bool whole = !table_.at(Role::kParam, Phase::kRest).sharded();
  return rest + (whole ? owned(flat).first : 0) + state.begin;
}

float* Executor::fetch_master(Flat& flat, ChunkState& state) {
  traffic_.fetch(state.master, mem::Account::kOptim);
  traffic_.wait_read(state.master);
  return master_of(flat, state);
}

// Over the part that only this rank counts: where gradients are replicated, each replica takes an
// equal piece, so every layout adds up the same pieces in the same order.
double Executor::own_squares(const Flat& flat) const {
  const mem::Lease& gradient = flat.summed ? flat.reduced.memory : flat.partial;
  if (!flat.trainable || !gradient) return 0.0;
  const Placement& place = table_.at(Role::kGrad, Phase::kUpdate);
  int64_t numel = flat.numel / num_shards(place, mesh_);
  const int64_t size = gradient.bytes() / numel;
  const char* at = gradient.data();
  for (const Axis axis : {Axis::kNode, Axis::kLocal}) {
    if (place.on(axis) != Layout::kReplicated) continue;
    numel /= mesh_.size(axis);
    at += mesh_.coordinate(group_.rank(), axis) * numel * size;
  }
  return optim::sum_squares(at, size == 4 ? Dtype::kFp32 : flat.dtype, numel);
}

double Executor::own_sum_squares() const {
  double sum = 0.0;
  for (const UnitState& unit : units_) {
    for (const Flat& flat : unit.flats) {
      const bool stored = flat.summed && flat.reduced.on_disk();
      sum += stored ? flat.squares : own_squares(flat);
    }
  }
  return sum;
}

void Executor::norm(const std::string& text) {
  finish_reductions();
  traffic_.settle();  // the last unit's write of the step before, long since done
  std::vector<Slot*> slots;
  for (UnitState& unit : units_) {
    for (Flat& flat : unit.flats) {
      if (flat.partial && mesh_.data() == 1) flat.complete_partial();
      if (flat.partial && mesh_.data() == 1 && !flat.summed) {
        flat.reduced.memory = std::move(flat.partial);
        flat.summed = true;
        put_sum_back(flat);
      }
      for (Slot& slot : flat.slots) slots.push_back(&slot);
    }
  }
  // Payload: sum of squares, the first bad contribution, one flag a parameter.
  std::string payload(sizeof(double) + kBadBytes + slots.size(), '\0');
  const double own = own_sum_squares();
  std::memcpy(payload.data(), &own, sizeof(own));
  update_.bad.copy(payload.data() + sizeof(double), kBadBytes - 1);
  for (size_t i = 0; i < slots.size(); ++i) {
    payload[sizeof(double) + kBadBytes + i] = static_cast<char>(slots[i]->touched);
  }
  double total = 0.0;
  std::string bad;
  for (const std::string& part : share(text, payload)) {
    double sum = 0.0;
    std::memcpy(&sum, part.data(), sizeof(sum));
    total += sum;
    if (bad.empty()) bad = part.c_str() + sizeof(double);
    for (size_t i = 0; i < slots.size(); ++i) {
      slots[i]->touched |= part[sizeof(double) + kBadBytes + i] != 0;
    }
  }
  if (!bad.empty() || !std::isfinite(total)) {
    discard_gradients();
    throw NonFinite(concat(
        "[exec::norm] the gradients are not finite; the weights are unchanged and the window was "
        "dropped. ",
        bad.empty() ? "Every contribution was finite: their sum overflowed"
                    : "First seen: " + bad));
  }
  grad_norm_ = std::sqrt(total) / update_.divisor;
  double scale = 1.0 / update_.divisor;
  if (update_.clip > 0.0) scale *= std::min(1.0, update_.clip / (grad_norm_ + 1e-6));
  grad_scale_ = static_cast<float>(scale);
  if (update_.external) {
    prepare_external();
    update_.external();
  }
}

void Executor::prepare_external() {
  for (UnitState& unit : units_) {
    for (Flat& flat : unit.flats) {
      if (!flat.trainable || !flat.summed) continue;
      const auto [begin, end] = owned(flat);
      const int64_t size = flat.reduced.memory.bytes() / (end - begin);
      flat.gradient32 = tiers_.host.take((end - begin) * 4, mem::Account::kGrad);
      auto* out = reinterpret_cast<float*>(flat.gradient32.data());
      optim::take(out, Dtype::kFp32, flat.reduced.data(), size == 4 ? Dtype::kFp32 : flat.dtype,
                  end - begin, false);
      for (int64_t i = 0; i < end - begin; ++i) out[i] *= grad_scale_;
    }
  }
}

void Executor::update(int index, const Chunk& chunk, bool write_back) {
  for (Flat& flat : units_[index].flats) {
    if (!flat.trainable) continue;
    ChunkState& state = flat.chunks.at(chunk.index);
    for (const Stored* copy : state.optimizer_state()) traffic_.wait_read(*copy);
    traffic_.wait_read(state.gradient);
    update_flat(flat, chunk, write_back);
    traffic_.drop(state.gradient);
    if (!chunk.last()) continue;
    for (Slot& slot : flat.slots) {
      slot.updates += slot.touched ? 1 : 0;
      slot.touched = false;
    }
    drop_sum(flat);
    flat.gradient32.reset();
  }
  traffic_.settle();  // what the chunk before wrote; this one's is written now
}

void Executor::update_flat(Flat& flat, const Chunk& chunk, bool write_back) {
  const bool used = std::any_of(flat.slots.begin(), flat.slots.end(),
                                [](const Slot& slot) { return slot.touched; });
  ChunkState& state = flat.chunks[chunk.index];
  if (!used || state.numel == 0) return;  // on no rank in this window
  // An axis whose reduction the plan left out has no gradient at its update placement.
  const Stored& gradient = flat.reduced.on_disk() ? state.gradient : flat.reduced;
  PENSTOCK_ASSERT(flat.summed && gradient.memory && !flat.partial,
                  concat("[exec::update] no step of the plan brought the gradient of ",
                         flat.slots.front().name, " to where the optimizer runs"));
  const int64_t begin = owned(flat).first + state.begin, end = begin + state.numel;
  // Runs of neighbouring parameters that share hyperparameters and step count are one pass.
  const size_t num_slots = flat.slots.size();
  for (size_t first = 0; first < num_slots;) {
    const Slot& slot = flat.slots[first];
    size_t next = first + 1;
    while (next < num_slots && flat.slots[next].group == slot.group &&
           flat.slots[next].touched == slot.touched && flat.slots[next].updates == slot.updates) {
      ++next;
    }
    const int64_t from = std::max(begin, slot.offset);
    const int64_t to = std::min(end, next < num_slots ? flat.slots[next].offset : flat.numel);
    if (slot.touched && from < to)
      update_range(flat, state, from - begin, to - begin, slot, write_back);
    first = next;
  }
}

// `begin` and `end` count from the chunk's first element.
void Executor::update_range(Flat& flat, ChunkState& state, int64_t begin, int64_t end,
                            const Slot& slot, bool write_back) {
  const int64_t size = reduced_element_bytes(flat);
  optim::Range range;
  range.master = master_of(flat, state) + begin;
  range.grad_dtype = size == 4 ? Dtype::kFp32 : flat.dtype;
  range.grad = flat.reduced.on_disk() ? state.gradient.data() + begin * size
                                      : flat.reduced.data() + (state.begin + begin) * size;
  range.param_dtype = flat.dtype;
  range.numel = end - begin;
  range.moment_dtype = table_.at(Role::kOptim, Phase::kUpdate).dtype;
  const bool whole = !table_.at(Role::kParam, Phase::kRest).sharded();
  const int64_t in_rest = (whole ? owned(flat).first : 0) + state.begin + begin;
  if (write_back && !shares_master(flat) && !flat.rest.on_disk()) {
    range.param_out = flat.rest.data() + in_rest * flat.element_bytes();
  }
  if (update_.external) {
    if (range.param_out != nullptr) {
      optim::take(range.param_out, flat.dtype, range.master, Dtype::kFp32, range.numel, false);
    }
    return;
  }
  const OptimizerConfig& group = update_.groups.at(slot.group);
  const int64_t in_moments = begin * dtype_bytes(range.moment_dtype);
  void* first = state.exp_avg.exists() ? state.exp_avg.data() + in_moments : nullptr;
  if (group.type == "SGD") {
    optim::sgd(range, first,
               {group.lr, group.momentum, group.dampening, group.weight_decay, group.nesterov,
                grad_scale_, slot.updates == 0});
  } else if (group.type == "Lion") {
    optim::lion(range, first,
                {group.lr, group.beta1, group.beta2, group.weight_decay, grad_scale_});
  } else if (group.type == "Adagrad") {
    optim::adagrad(
        range, static_cast<float*>(first),
        {group.lr, group.lr_decay, group.eps, group.weight_decay, grad_scale_, slot.updates + 1});
  } else {
    optim::adam(range, first, state.exp_avg_sq.data() + in_moments,
                {group.lr, group.beta1, group.beta2, group.eps, group.weight_decay,
                 group.type == "AdamW", grad_scale_, slot.updates + 1});
  }
}

// Parameters that rest on disk go there whole, with the parts that this step did not touch.
void Executor::publish_to_disk(int unit, const Chunk& chunk) {
  for (Flat& flat : units_[unit].flats) {
    if (!flat.trainable) continue;
    traffic_.drop(flat.rest);  // should anybody have left the old values in memory
    ChunkState& state = flat.chunks.at(chunk.index);
    traffic_.make_room(state.param, mem::Account::kParam);
    optim::take(state.param.data(), flat.dtype, master_of(flat, state), Dtype::kFp32, state.numel,
                false);
    traffic_.put_back(state.param);
  }
}

void Executor::publish(const PlannedStep& planned) {
  for (const Move& move : planned.step.moves) {
    if (move.kind == MoveKind::kCast) continue;  // done in the update's own pass
    if (move.kind == MoveKind::kCopy) {          // so is this, but for the way to disk
      if (move.to != Tier::kDisk) continue;
      on_update_lane(planned.step.units, [this, step = planned.step] {
        for (const int unit : step.units) publish_to_disk(unit, step.chunk);
      });
      continue;
    }
    PENSTOCK_ASSERT(move.kind == MoveKind::kAllGather,
                    concat("[exec::publish] not executable here: ", planned.text));
    const comm::Members group = members(move.axes);
    std::vector<comm::GatherBuffer> buffers;
    std::vector<Event> updated;
    for (const int unit : planned.step.units) {
      updated.push_back(units_[unit].updated);
      for (Flat& flat : units_[unit].flats) {
        if (flat.trainable) buffers.push_back({flat.rest.data(), flat.rest.bytes / group.size()});
      }
    }
    const Event ready = gather_lane_.submit([this, group, buffers, updated, label = planned.text] {
      for (const Event& update : updated) update.wait();
      gather_channel_.all_gather(label, group, buffers);
    });
    for (const int unit : planned.step.units) units_[unit].param_ready = ready;
  }
}

}  // namespace penstock::exec
