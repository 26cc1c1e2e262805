// The executor's collective reads and writes outside the plan: full gradients and weights, edits,
// and the pieces that a user's own optimizer works on.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "src/base/text.h"
#include "src/exec/executor.h"
#include "src/optim/kernels.h"

namespace penstock::exec {

namespace {

std::vector<Axis> sharded_axes(const Placement& place) {
  std::vector<Axis> axes;
  for (const Axis axis : {Axis::kNode, Axis::kLocal}) {
    if (place.on(axis) == Layout::kSharded) axes.push_back(axis);
  }
  return axes;
}

float* floats(const at::Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

at::Tensor zeros32(int64_t numel) { return at::zeros({numel}, at::TensorOptions(at::kFloat)); }

}  // namespace

// `full` holds this rank's shard of `numel` values in its place.
void Executor::gather_whole(const Placement& place, float* full, int64_t numel,
                            const std::string& label) {
  const std::vector<Axis> axes = sharded_axes(place);
  if (axes.empty()) return;
  control_channel_.all_gather(label, members(axes), {{full, numel * 4}});
}

at::Tensor Executor::reduced_full(Flat& flat, const std::string& label) {
  at::Tensor full = zeros32(flat.numel);
  const Placement& place = table_.at(Role::kGrad, Phase::kUpdate);
  const Dtype dtype = table_.dtype_in(place, flat.dtype);
  const int64_t numel = flat.numel / num_shards(place, mesh_);
  traffic_.fetch(flat.reduced, mem::Account::kGrad);
  traffic_.wait_read(flat.reduced);
  float* own = floats(full) + shard_index(place, mesh_, group_.rank()) * numel;
  optim::take(own, Dtype::kFp32, flat.reduced.data(), dtype, numel, false);
  traffic_.let_go(flat.reduced);
  gather_whole(place, floats(full), numel, label);
  return full;
}

at::Tensor Executor::partial_full(Flat& flat, const std::string& label) {
  at::Tensor full = zeros32(flat.numel), scratch = zeros32(flat.numel);
  const Dtype dtype = partial_dtype(flat);
  for (const Slot& slot : flat.slots) {
    if (!flat.partial || !slot.written) continue;
    optim::take(floats(full) + slot.offset, Dtype::kFp32,
                flat.partial.data() + slot.offset * dtype_bytes(dtype), dtype, slot.numel, false);
  }
  if (mesh_.data() == 1) return full;
  comm::ReduceBuffer buffer;
  buffer.partial = full.data_ptr();
  buffer.scratch = scratch.data_ptr();
  buffer.numel = flat.numel;
  buffer.scale = 1.0F / static_cast<float>(mesh_.data());
  control_channel_.all_reduce(label, members({Axis::kNode, Axis::kLocal}), {buffer});
  return full;
}

at::Tensor Executor::full_flat(int index, int flat_index, Role role) {
  finish_updates();
  Flat& flat = units_[index].flats[flat_index];
  const std::string label = concat("read u", index, ".", flat_index, " ", role_name(role));
  if (role == Role::kGrad) {
    // Where gradients rest as partial sums every rank must take part, whoever has contributions.
    finish_reductions();
    at::Tensor full = flat.summed ? reduced_full(flat, label) : zeros32(flat.numel);
    if (table_.holds_grad_in_place() || flat.partial) {
      full.add_(partial_full(flat, label));
    }
    return full;
  }
  at::Tensor full = zeros32(flat.numel);
  const Placement& place = flat.trainable ? table_.at(Role::kOptim, Phase::kUpdate)
                                          : table_.at(Role::kParam, Phase::kRest);
  const int64_t numel = flat.numel / num_shards(place, mesh_);
  float* own = floats(full) + shard_index(place, mesh_, group_.rank()) * numel;
  if (flat.trainable) {
    for (ChunkState& chunk : flat.chunks) {
      std::memcpy(own + chunk.begin, fetch_master(flat, chunk), chunk.numel * 4);
      traffic_.let_go(chunk.master);
    }
  } else {
    traffic_.fetch(flat.rest, mem::Account::kParam);
    traffic_.wait_read(flat.rest);
    optim::take(own, Dtype::kFp32, flat.rest.data(), flat.dtype, numel, false);
    traffic_.let_go(flat.rest);
  }
  gather_whole(place, floats(full), numel, label);
  return full;
}

void Executor::refresh(int index) {
  finish_updates();
  UnitState& unit = units_[index];
  for (Flat& flat : unit.flats) {
    char* full = unit.gathered ? flat.current.data() : flat.rest.data();
    const int64_t bytes = flat.numel * flat.element_bytes();
    control_channel_.broadcast(concat("refresh u", index), members({Axis::kNode, Axis::kLocal}),
                               full, bytes);
    if (unit.gathered) {
      const Placement& rest = table_.at(Role::kParam, Phase::kRest);
      const int64_t shard = flat.rest.bytes;
      traffic_.make_room(flat.rest, mem::Account::kParam);
      std::memcpy(flat.rest.data(), full + shard_index(rest, mesh_, group_.rank()) * shard, shard);
      traffic_.put_back(flat.rest);
      traffic_.settle();
    }
    const char* owned_part = full + owned(flat).first * flat.element_bytes();
    for (ChunkState& chunk : flat.chunks) refresh_master(flat, chunk, owned_part);
  }
}

// Where the low-precision value did not change, the master keeps its lower bits.
void Executor::refresh_master(Flat& flat, ChunkState& chunk, const char* owned_part) {
  if (!chunk.master.exists()) return;
  const char* source = owned_part + chunk.begin * flat.element_bytes();
  float* master = fetch_master(flat, chunk);
  std::vector<char> rounded(chunk.numel * flat.element_bytes());
  optim::take(rounded.data(), flat.dtype, master, Dtype::kFp32, chunk.numel, false);
  for (int64_t i = 0; i < chunk.numel; ++i) {
    const int64_t at = i * flat.element_bytes();
    if (std::memcmp(&rounded[at], source + at, flat.element_bytes()) == 0) continue;
    optim::take(master + i, Dtype::kFp32, source + at, flat.dtype, 1, false);
  }
  traffic_.put_back(chunk.master);
  traffic_.settle();
}

std::vector<ShardView> Executor::shard_views() {
  finish_updates();
  std::vector<ShardView> views;
  for (UnitState& unit : units_) {
    for (Flat& flat : unit.flats) {
      if (!flat.trainable) continue;
      const auto [begin, end] = owned(flat);
      for (const Slot& slot : flat.slots) {
        const int64_t from = std::max(begin, slot.offset);
        const int64_t to = std::max(from, std::min(end, slot.offset + slot.numel));
        views.push_back({slot.name, slot.param,
                         at::from_blob(master_of(flat, flat.chunks.front()) + (from - begin),
                                       {to - from}, at::TensorOptions(at::kFloat))});
      }
    }
  }
  return views;
}

std::vector<at::Tensor> Executor::shard_gradients() {
  std::vector<at::Tensor> gradients;
  for (UnitState& unit : units_) {
    for (Flat& flat : unit.flats) {
      if (!flat.trainable) continue;
      const auto [begin, end] = owned(flat);
      for (const Slot& slot : flat.slots) {
        const int64_t from = std::max(begin, slot.offset);
        const int64_t to = std::max(from, std::min(end, slot.offset + slot.numel));
        if (!slot.touched) {
          gradients.emplace_back();
          continue;
        }
        float* base = reinterpret_cast<float*>(flat.gradient32.data());
        gradients.push_back(
            at::from_blob(base + (from - begin), {to - from}, at::TensorOptions(at::kFloat)));
      }
    }
  }
  return gradients;
}

std::vector<std::string> Executor::share(const std::string& label, const std::string& payload) {
  return control_channel_.share(label, members({Axis::kNode, Axis::kLocal}), payload);
}

void Executor::broadcast(const std::string& label, void* data, int64_t bytes) {
  control_channel_.broadcast(label, members({Axis::kNode, Axis::kLocal}), data, bytes);
}

}  // namespace penstock::exec
