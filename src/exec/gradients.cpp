// The executor's gradients: taken from autograd into the unit's partial sum, and reduced.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/exec/executor.h"
#include "src/optim/kernels.h"

namespace penstock::exec {

// Held in place, partial sums have the dtype that sums over time are kept in.
Dtype Executor::partial_dtype(const Flat& flat) const {
  const Phase phase = table_.holds_grad_in_place() ? Phase::kHold : Phase::kBackward;
  return table_.dtype_in(table_.at(Role::kGrad, phase), flat.dtype);
}

bool Executor::take_gradient(int unit, int flat_index, int slot_index, const at::Tensor& gradient) {
  Flat& flat = units_[unit].flats[flat_index];
  Slot& slot = flat.slots[slot_index];
  if (gradient.layout() != at::kStrided) {
    throw RuntimeFault(concat("[exec::take_gradient] parameter \"", slot.name,
                              "\" has a sparse gradient, which is not supported: build the "
                              "embedding with sparse=False"));
  }
  units_[unit].updated.wait();
  const Dtype dtype = partial_dtype(flat);
  if (!flat.partial) {
    flat.partial = tiers_.device.take(flat.numel * dtype_bytes(dtype), mem::Account::kGrad);
  }
  const at::Tensor dense = gradient.contiguous();
  char* at = flat.partial.data() + slot.offset * dtype_bytes(dtype);
  const Dtype from = dtype_of(dense.scalar_type());
  optim::take(at, dtype, dense.const_data_ptr(), from, slot.numel, slot.written);
  slot.written = slot.touched = true;
  return optim::first_nonfinite(dense.const_data_ptr(), from, slot.numel) < 0;
}

void Executor::discard_gradients() {
  for (const UnitState& unit : units_) unit.updated.settle();
  finish_reductions();
  for (UnitState& unit : units_) {
    for (Flat& flat : unit.flats) {
      flat.partial.reset();
      drop_sum(flat);
      flat.gradient32.reset();
      for (Slot& slot : flat.slots) slot.written = slot.touched = false;
      for (ChunkState& chunk : flat.chunks) {  // read ahead of an update that does not come
        for (Stored* copy : chunk.optimizer_state()) {
          if (copy->on_disk()) traffic_.drop(*copy);
        }
      }
    }
  }
}

void Executor::set_gradient(int unit, int flat_index, int slot_index, const at::Tensor& full,
                            double factor) {
  finish_updates();
  finish_reductions();
  Flat& flat = units_[unit].flats[flat_index];
  Slot& slot = flat.slots[slot_index];
  slot.touched = true;
  if (!flat.partial && !flat.summed) {  // one rank, where nothing contributed to this unit
    flat.partial =
        tiers_.device.take(flat.numel * dtype_bytes(partial_dtype(flat)), mem::Account::kGrad);
  }
  const bool whole = static_cast<bool>(flat.partial);
  if (!whole) {
    traffic_.fetch(flat.reduced, mem::Account::kGrad);
    traffic_.wait_read(flat.reduced);
  }
  const mem::Lease& at = whole ? flat.partial : flat.reduced.memory;
  slot.written |= whole;
  const Placement& place = table_.at(Role::kGrad, Phase::kUpdate);
  const int64_t shard = whole ? flat.numel : flat.numel / num_shards(place, mesh_);
  const int64_t begin = whole ? 0 : shard_index(place, mesh_, group_.rank()) * shard;
  const int64_t from = std::max(begin, slot.offset);
  const int64_t to = std::min(begin + shard, slot.offset + slot.numel);
  if (from >= to) return;
  const at::Tensor part = full.reshape({-1}).narrow(0, from - slot.offset, to - from).mul(factor);
  const int64_t size = at.bytes() / shard;
  optim::take(at.data() + (from - begin) * size, size == 4 ? Dtype::kFp32 : flat.dtype,
              part.const_data_ptr(), Dtype::kFp32, to - from, false);
  if (!whole) put_sum_back(flat);
}

// Of a gradient on disk only the sum of its squares stays in memory.
void Executor::put_sum_back(Flat& flat) {
  if (!flat.reduced.on_disk()) return;
  flat.squares = own_squares(flat);
  traffic_.put_back(flat.reduced);
}

void Executor::drop_sum(Flat& flat) {
  traffic_.drop(flat.reduced);
  for (ChunkState& chunk : flat.chunks) traffic_.drop(chunk.gradient);
  flat.summed = false;
}

void Executor::reduce(const PlannedStep& planned) {
  PENSTOCK_ASSERT(planned.step.role == Role::kGrad,
                  concat("[exec::reduce] not executable here: ", planned.text));
  finish_reductions();  // the lane is one reduction deep, which bounds the buffers in flight
  std::vector<std::function<void()>> work;
  for (const int unit : planned.step.units) {
    units_[unit].updated.wait();
    for (size_t flat = 0; flat < units_[unit].flats.size(); ++flat) {
      if (!units_[unit].flats[flat].trainable) continue;
      start_reduction(unit, static_cast<int>(flat), planned, work);
    }
  }
  reduced_ = reduce_lane_.submit([work = std::move(work)] {
    for (const auto& one : work) one();
  });
}

void Executor::start_reduction(int unit, int flat_index, const PlannedStep& planned,
                               std::vector<std::function<void()>>& work) {
  Flat& flat = units_[unit].flats[flat_index];
  ReduceWork job;
  job.dtype = job.result_dtype = partial_dtype(flat);
  if (!flat.partial) {  // nothing contributed here: the sum over the other ranks still counts
    flat.partial = tiers_.device.take(flat.numel * dtype_bytes(job.dtype), mem::Account::kGrad);
  }
  flat.complete_partial();
  Placement place = table_.at(Role::kGrad, Phase::kBackward);
  for (const Move& move : planned.step.moves) {
    place = apply(place, move);
    if (move.is_collective()) job.collectives.push_back(move);
    if (move.kind == MoveKind::kCast) job.result_dtype = table_.dtype_in(place, flat.dtype);
  }
  Reduction reduction;
  reduction.unit = unit;
  reduction.flat = flat_index;
  reduction.partial = std::move(flat.partial);
  take_reduce_buffers(job, flat.numel, reduction);
  const int64_t result_numel = flat.numel / num_shards(place, mesh_);
  job.accumulate = flat.summed;
  if (job.accumulate) {
    traffic_.fetch(flat.reduced, mem::Account::kGrad);
    traffic_.wait_read(flat.reduced);
  }
  reduction.in_place = result_numel == flat.numel && job.result_dtype == job.dtype &&
                       !job.accumulate && !reduction.between && place.tier == Tier::kDevice;
  if (!reduction.in_place && !job.accumulate) {
    flat.reduced.memory =
        tiers_.arena(place.tier)
            .take(result_numel * dtype_bytes(job.result_dtype), mem::Account::kGrad);
  }
  job.label = concat(planned.text, " ", unit, ".", flat_index);
  job.partial = reduction.partial.data();
  job.scratch = reduction.scratch.data();
  job.between = reduction.between.data();
  job.result = reduction.in_place ? nullptr : flat.reduced.data();
  job.numel = flat.numel;
  work.emplace_back([this, job = std::move(job)] { run_reduction(job); });
  reductions_.push_back(std::move(reduction));
}

// Between two collectives the sum stays in fp32.
void Executor::take_reduce_buffers(const ReduceWork& job, int64_t numel, Reduction& reduction) {
  const bool widens = job.collectives.size() > 1 && job.dtype != Dtype::kFp32;
  int64_t stage = reduction.partial.bytes(), scratch = 1;
  for (const Move& move : job.collectives) {
    const int size = members(move.axes).size();
    scratch = std::max(scratch, stage / size * (size - 1));
    if (move.kind == MoveKind::kReduceScatter) stage /= size;
    if (!widens || reduction.between) continue;
    stage = numel / size * 4;
    reduction.between = tiers_.device.take(stage, mem::Account::kBuffers);
  }
  reduction.scratch = tiers_.device.take(scratch, mem::Account::kBuffers);
}

// On the reduce lane.
void Executor::run_reduction(const ReduceWork& job) {
  char* at = job.partial;
  Dtype at_dtype = job.dtype;
  int64_t left = job.numel;
  float scale = 1.0F / static_cast<float>(mesh_.data());
  for (size_t i = 0; i < job.collectives.size(); ++i) {
    const comm::Members group = members(job.collectives[i].axes);
    comm::ReduceBuffer buffer{at, job.scratch, nullptr, at_dtype, at_dtype, left, scale, false};
    scale = 1.0F;
    if (job.collectives[i].kind == MoveKind::kAllReduce) {
      reduce_channel_.all_reduce(job.label, group, {buffer});
      continue;
    }
    const bool last = i + 1 == job.collectives.size();
    left /= group.size();
    char* own = at + group.index * left * dtype_bytes(at_dtype);
    if (job.between != nullptr) {
      own = job.between;
      at_dtype = Dtype::kFp32;
    }
    buffer.result = last ? job.result : own;
    buffer.result_dtype = last ? job.result_dtype : at_dtype;
    buffer.accumulate = last && job.accumulate;
    reduce_channel_.reduce_scatter(job.label, group, {buffer});
    if (last) return;
    at = own;
  }
  if (job.result == nullptr) return;
  optim::take(job.result, job.result_dtype, at, at_dtype, left, job.accumulate);
}

void Executor::finish_reductions() {
  if (reductions_.empty()) return;
  reduced_.wait();
  if (table_.at(Role::kGrad, Phase::kHold).tier == Tier::kDisk) traffic_.settle();
  for (Reduction& reduction : reductions_) {
    Flat& flat = units_[reduction.unit].flats[reduction.flat];
    if (reduction.in_place) flat.reduced.memory = std::move(reduction.partial);
    flat.summed = true;
    put_sum_back(flat);
  }
  reductions_.clear();
}

}  // namespace penstock::exec
