// The executor's gradients: taken from autograd into the unit's partial sum, and reduced.
#include <ATen/core/Tensor.h>

#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/exec/executor.h"
#include "src/optim/kernels.h"

namespace penstock::exec {

namespace {

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFp32;
    case at::kBFloat16:
      return Dtype::kBf16;
    case at::kHalf:
      return Dtype::kFp16;
    default:
      throw RuntimeFault(concat("[exec::take_gradient] a gradient of dtype ", tensor.dtype().name(),
                                " is not supported: float32, bfloat16 and float16 are"));
  }
}

}  // namespace

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
  const Dtype dtype = partial_dtype(flat);
  if (!flat.partial) {
    flat.partial = arena_.take(flat.numel * dtype_bytes(dtype), mem::Account::kGrad);
  }
  const at::Tensor dense = gradient.contiguous();
  char* at = flat.partial.data() + slot.offset * dtype_bytes(dtype);
  const Dtype from = dtype_of(dense);
  optim::take(at, dtype, dense.const_data_ptr(), from, slot.numel, slot.written);
  slot.written = slot.touched = true;
  return optim::first_nonfinite(dense.const_data_ptr(), from, slot.numel) < 0;
}

void Executor::discard_gradients() {
  finish_reductions();
  for (UnitState& unit : units_) {
    for (Flat& flat : unit.flats) {
      flat.partial.reset();
      flat.reduced.reset();
      for (Slot& slot : flat.slots) slot.written = slot.touched = false;
    }
  }
}

void Executor::reduce(const PlannedStep& planned) {
  PENSTOCK_ASSERT(planned.step.role == Role::kGrad,
                  concat("[exec::reduce] not executable here: ", planned.text));
  finish_reductions();  // the lane is one reduction deep, which bounds the buffers in flight
  std::vector<std::function<void()>> work;
  for (const int unit : planned.step.units) {
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
  const Dtype dtype = partial_dtype(flat);
  if (!flat.partial) {  // nothing contributed here: the sum over the other ranks still counts
    flat.partial = arena_.take(flat.numel * dtype_bytes(dtype), mem::Account::kGrad);
  }
  flat.complete_partial();
  Reduction reduction;
  reduction.unit = unit;
  reduction.flat = flat_index;
  reduction.partial = std::move(flat.partial);
  const int64_t scratch = reduction.partial.bytes() / mesh_.data() * (mesh_.data() - 1);
  reduction.scratch = arena_.take(std::max<int64_t>(scratch, 1), mem::Account::kBuffers);

  Placement place = table_.at(Role::kGrad, Phase::kBackward);
  std::vector<Move> collectives;
  Dtype result_dtype = dtype;
  for (const Move& move : planned.step.moves) {
    place = apply(place, move);
    if (move.is_collective()) collectives.push_back(move);
    if (move.kind == MoveKind::kCast) result_dtype = table_.dtype_in(place, flat.dtype);
  }
  const int64_t result_numel = flat.numel / num_shards(place, mesh_);
  const bool accumulate = static_cast<bool>(flat.reduced);
  reduction.in_place = result_numel == flat.numel && result_dtype == dtype && !accumulate;
  if (!reduction.in_place && !accumulate) {
    flat.reduced = arena_.take(result_numel * dtype_bytes(result_dtype), mem::Account::kGrad);
  }
  char* result = reduction.in_place ? nullptr : flat.reduced.data();
  work.emplace_back([=, this, label = concat(planned.text, " ", unit, ".", flat_index),
                     partial = reduction.partial.data(), scratch = reduction.scratch.data(),
                     numel = flat.numel] {
    char* at = partial;
    int64_t left = numel;
    float scale = 1.0F / static_cast<float>(mesh_.data());
    for (size_t i = 0; i < collectives.size(); ++i) {
      const comm::Members group = members(collectives[i].axes);
      comm::ReduceBuffer buffer{at, scratch, nullptr, dtype, dtype, left, scale, false};
      scale = 1.0F;
      if (collectives[i].kind == MoveKind::kAllReduce) {
        reduce_channel_.all_reduce(label, group, {buffer});
        continue;
      }
      const bool last = i + 1 == collectives.size();
      left /= group.size();
      char* own = at + group.index * left * dtype_bytes(dtype);
      buffer.result = last ? result : own;
      buffer.result_dtype = last ? result_dtype : dtype;
      buffer.accumulate = last && accumulate;
      reduce_channel_.reduce_scatter(label, group, {buffer});
      if (last) return;
      at = own;
    }
    if (result == nullptr) return;
    optim::take(result, result_dtype, at, dtype, left, accumulate);
  });
  reductions_.push_back(std::move(reduction));
}

void Executor::finish_reductions() {
  if (reductions_.empty()) return;
  reduced_.wait();
  for (Reduction& reduction : reductions_) {
    Flat& flat = units_[reduction.unit].flats[reduction.flat];
    if (reduction.in_place) flat.reduced = std::move(reduction.partial);
  }
  reductions_.clear();
}

}  // namespace penstock::exec
