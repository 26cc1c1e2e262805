#include "src/engine/model/adoption.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/text.h"
#include "src/ckpt/weights_file.h"
#include "src/device/host_kernels.h"
#include "src/device/torch_compat.h"
#include "src/engine/model/blueprint.h"
#include "src/engine/model/memory_budget.h"
#include "src/engine/step/unit_order.h"
#include "src/plan/strategy.h"

namespace penstock::engine {

namespace {

bool is_tile(const exec::Slot& slot, const ModelTree& tree) {
  return tree.params[slot.index].param.unsafeGetTensorImpl() != slot.param.unsafeGetTensorImpl();
}

// Returns whether all values of the flat are in files. The result is the same on every rank.
bool in_files(const exec::Flat& flat, const ModelTree& tree) {
  return tree.init && std::all_of(flat.slots.begin(), flat.slots.end(),
                                  [&](const auto& slot) { return tree.init->in_file(slot.param); });
}

// Returns the bytes of the flat's values in users' files if the values can stay there: if all of
// them are in files, in their resting dtype and whole. Otherwise returns nothing. The result is the
// same on every rank.
std::vector<mem::FilePart> parts_in_files(const exec::Flat& flat, const ModelTree& tree) {
  std::vector<mem::FilePart> parts;
  if (flat.trainable || flat.placement.is_sharded() || !in_files(flat, tree)) return parts;
  const int64_t size = flat.element_bytes();
  for (const exec::Slot& slot : flat.slots) {
    const FileValues from = tree.init->file_of(slot.param);
    if (from.dtype != device::scalar_type(flat.dtype) || is_tile(slot, tree)) return {};
    parts.push_back(
        WeightsFile::part(from.file, from.offset, slot.numel * size, slot.offset * size));
  }
  return parts;
}

// Reads the values of a slot from a file, but only values in the ranges `kept` of the flat.
void read_kept(const exec::Slot& slot, const std::vector<std::pair<int64_t, int64_t>>& kept,
               const ShardedInit& init, const at::Tensor& full) {
  for (const auto& [first, end] : kept) {
    const int64_t begin = std::max(first, slot.offset);
    const int64_t count = std::min(end, slot.offset + slot.numel) - begin;
    if (count > 0) init.read(slot.param, begin - slot.offset, full.narrow(0, begin, count));
  }
}

at::Tensor initial_values(const exec::Slot& slot, const ModelTree& tree) {
  if (!tree.init || !tree.init->holds(slot.param)) return slot.param.detach();
  if (!is_tile(slot, tree)) return tree.init->take(slot.param);
  // Each tile reads its own rows. take() frees the parameter's values after all tiles have read
  // their rows.
  return tree.init->whole(slot.param)
      .as_strided(slot.param.sizes(), slot.param.strides(), slot.param.storage_offset())
      .clone();
}

}  // namespace

void set_window(const at::Tensor& param, c10::Storage storage, at::ScalarType dtype,
                at::IntArrayRef sizes) {
  const auto options = param.options().device(storage.device()).dtype(dtype).requires_grad(false);
  // The gradient accumulator expects the old sizes, and set_data() drops it only if the dtype
  // changes. So the dtype is changed temporarily.
  if (param.sizes() != sizes) device::set_data(param, at::empty({0}, options.dtype(at::kDouble)));
  at::Tensor window = at::empty({0}, options);
  window.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  window.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  device::set_data(param, window);
}

void own_storage(const at::Tensor& param, Dtype dtype, at::IntArrayRef sizes) {
  own_storage(param, dtype, sizes, param.device());
}

void own_storage(const at::Tensor& param, Dtype dtype, at::IntArrayRef sizes, c10::Device where) {
  const auto bytes = c10::multiply_integers(sizes) * dtype_bytes(dtype);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       c10::DataPtr(nullptr, where),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  set_window(param, c10::Storage(std::move(storage)), device::scalar_type(dtype), sizes);
}

namespace {

// Frees a parameter's memory and gives it an engine storage on `where`. Views of the old storage
// stay views of the parameter if device, dtype, layout and sizes stay the same; otherwise reading
// them raises an error.
void take_storage(const at::Tensor& param, Dtype dtype, at::IntArrayRef sizes, c10::Device where) {
  const c10::Storage storage = param.storage();
  c10::StorageImpl* old = storage.unsafeGetStorageImpl();
  param.mutable_grad().reset();
  const bool its_own = param.storage_offset() == 0 && old->nbytes() == param.nbytes();
  if (!its_own || storage.use_count() <= 2) return own_storage(param, dtype, sizes, where);
  const bool stays = param.is_contiguous() && param.scalar_type() == device::scalar_type(dtype) &&
                     param.sizes() == sizes && param.device() == where;
  old->set_data_ptr_noswap(c10::DataPtr(nullptr, old->device()));
  if (stays) return old->set_resizable(false);
  device::set_guard(
      *old,
      "[engine::initialize] this view of a parameter was taken before initialize(), which changed "
      "the parameter's device, dtype, layout or part. Take views after initialize(), and clone "
      "values that you want to keep");
  own_storage(param, dtype, sizes, where);
}

// Gives the parameter a window without memory.
void give_window(exec::Slot& slot, Dtype dtype, const ModelTree& tree) {
  const c10::Device where = tree.device.value_or(slot.param.device());
  if (is_tile(slot, tree)) {
    // The memory belongs to the user's parameter, which may have views.
    own_storage(slot.param, dtype, slot.sizes, where);
  } else {
    take_storage(slot.param, dtype, slot.sizes, where);
  }
  slot.window = slot.param.storage();
}

// Gives the parameters of a flat that rests in users' files their windows.
void take_from_files(exec::Flat& flat, const ModelTree& tree) {
  for (exec::Slot& slot : flat.slots) {
    tree.init->drop(slot.param);
    give_window(slot, flat.dtype, tree);
  }
  flat.detach();
}

// A value that is not finite would make its whole block NaN on a lossy wire.
void refuse_nonfinite(const exec::Flat& flat, const at::Tensor& values) {
  const int64_t bad =
      device::host::first_nonfinite(values.const_data_ptr(), Dtype::kFp32, values.numel());
  for (const exec::Slot& slot : flat.slots) {
    if (bad < slot.offset || bad >= slot.offset + slot.numel) continue;
    throw ConfigError(
        concat("[engine::initialize] parameter \"", slot.name,
               "\" has a value that is not finite. A lossy wire of parameters (comm.codec, "
               "table.wire.param or table.wire.publish) or \"quantize\" would make the values "
               "beside it NaN. Make the parameter a buffer, or leave its values plain"));
  }
}

}  // namespace

Adoption::~Adoption() {
  if (committed_) return;
  for (const auto& [buffer, former] : cast_) device::set_data(buffer, former);
  for (exec::UnitState& unit : executor_.units()) {
    for (exec::Flat& flat : unit.flats) flat.let_params_go();
  }
  tiers_.close_disk();
}

void Adoption::claim(const ModelTree& tree, const Config& config, const ModelDesc& model,
                     bool external_optimizer) {
  leave_in_files(tree);
  std::exception_ptr error;
  std::string mine;
  try {
    claim_here(config, model, external_optimizer);
  } catch (const std::exception& problem) {
    error = std::current_exception();
    mine = problem.what();
  }
  const std::vector<std::string> texts = share_text(
      "room for what rests", mine, [this](const std::string& label, const std::string& payload) {
        return executor_.share(label, payload);
      });
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    throw RuntimeFault(concat("[engine::initialize] rank ", rank, " failed with: ", texts[rank]));
  }
}

void Adoption::leave_in_files(const ModelTree& tree) {
  const Table& table = executor_.table();
  const Placement& rest = table.at(Role::kParam, Phase::kRest);
  if (rest.tier != Tier::kDisk || table.wires.param.lossy()) return;
  for (exec::UnitState& unit : executor_.units()) {
    for (exec::Flat& flat : unit.flats) {
      const Dtype dtype = table.dtype_in(rest, flat.dtype, flat.quantized);
      if (dtype == flat.dtype) flat.files = parts_in_files(flat, tree);
    }
  }
}

// Reserves the resting copies of this rank. Throws if a disk is too full.
void Adoption::claim_here(const Config& config, const ModelDesc& model, bool external_optimizer) {
  const Table& table = executor_.table();
  mem::DiskOptions options;
  options.paths = swap_folders(config.offload);
  options.checksums = config.offload.checksums;
  options.stall_s = config.offload.timeout_s;
  options.recorder = tiers_.recorder;
  if (table.uses_disk()) tiers_.disk.emplace(options);
  // The sizes of activations and caches are only known at run time, so their files grow.
  if (table.at(Role::kAct, Phase::kHold).tier == Tier::kDisk) {
    executor_.activations().open_disk(options);
  }
  if (table.at(Role::kCache, Phase::kRest).tier == Tier::kDisk) {
    executor_.caches().open_disk(options);
  }
  check_moments(config, external_optimizer);
  executor_.claim(model, external_optimizer ? 0 : num_moments(config));
}

void Adoption::check_moments(const Config& config, bool external_optimizer) const {
  const Placement& rest = executor_.table().at(Role::kOptim, Phase::kRest);
  if (rest.dtype == Dtype::kFp32) return;
  const OptimizerKind& kind = kind_of(config.optimizer.value_or(OptimizerConfig{}).type);
  if (!external_optimizer && kind.takes("moments_dtype")) return;
  throw ConfigError(concat("[engine::initialize] table.optim.rest is \"", rest.text(),
                           "\", but bf16 moments (optimizer.moments_dtype) do not work with ",
                           external_optimizer
                               ? "an optimizer of your own, which keeps its state itself"
                               : concat(kind.name, ", whose state must be fp32"),
                           ". Use fp32 moments"));
}

void Adoption::take(const ModelTree& tree, const Config& config,
                    const std::vector<tiles::TiledWeight>& tiled) {
  const std::string narrow = narrow_flats();
  size_t number = 0;
  for (size_t unit = 0; unit < executor_.units().size(); ++unit) {
    for (const exec::Part& part : executor_.units()[unit].parts()) {
      const bool is_narrow = narrow[number++] == '1';
      if (part.flat->in_files) {
        take_from_files(*part.flat, tree);
        continue;
      }
      const std::string label = concat("initial u", unit, ".", part.flat->number);
      const at::Tensor values = take_values(part, label, tree, is_narrow);
      const TableWires& wires = executor_.table().wires;
      const bool publishes = wires.publish.lossy() && part.flat->trainable;
      if (wires.param.lossy() || publishes || part.flat->quantized) {
        refuse_nonfinite(*part.flat, values);
      }
      if (part.here) {
        executor_.values().adopt(*part.flat, values, label);
      } else {
        part.flat->detach();
      }
      mem::trim_heap(2 * part.flat->numel * 4);
    }
  }
  executor_.traffic().settle();  // no plan line accounts for the memory of these writes
  take_buffers(tree, config);
  for (const tiles::TiledWeight& one : tiled) {
    if (tree.init && tree.init->holds(one.whole)) tree.init->drop(one.whole);
    take_storage(one.whole, exec::dtype_of(one.tiles.front().scalar_type()), one.whole.sizes(),
                 tree.device.value_or(one.whole.device()));
  }
}

// [all ranks] Returns one character per flat: '1' if, on every rank, the flat's parameters already
// have the flat's low-precision dtype. Their values can then be sent in that dtype.
std::string Adoption::narrow_flats() {
  std::string mine;
  bool any_low = false;
  for (exec::UnitState& unit : executor_.units()) {
    for (const exec::Part& part : unit.parts()) {
      const exec::Flat& flat = *part.flat;
      any_low |= flat.dtype != Dtype::kFp32;
      const bool narrow = flat.dtype != Dtype::kFp32 &&
                          std::all_of(flat.slots.begin(), flat.slots.end(), [&](const auto& slot) {
                            return slot.param.scalar_type() == device::scalar_type(flat.dtype);
                          });
      mine += narrow ? '1' : '0';
    }
  }
  if (!any_low) return mine;
  std::string all = mine;
  for (const std::string& one : executor_.share("dtypes of initial values", mine)) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = std::min(all[i], one[i]);
  }
  return all;
}

// [all ranks] Overwrites the values with those of rank 0 (of the first node).
void Adoption::broadcast(const std::string& label, const at::Tensor& values) {
  const auto bytes = static_cast<int64_t>(values.nbytes());
  if (between_nodes_ && rank_ == 0) between_nodes_(label, values.data_ptr(), bytes);
  executor_.broadcast(label, values.data_ptr(), bytes);
}

// [all ranks] Returns rank 0's values of the flat, in fp32, and gives the parameters their windows.
// If all values are in files, there is no broadcast, and each rank reads only the values that it
// keeps. A cut parameter is broadcast whole, and each rank takes its part.
at::Tensor Adoption::take_values(const exec::Part& part, const std::string& label,
                                 const ModelTree& tree, bool narrow) {
  exec::Flat& flat = *part.flat;
  at::Tensor full = at::zeros({flat.numel}, at::TensorOptions(at::kFloat));
  const bool cut = flat.placement.is_sharded();
  const bool read = !cut && in_files(flat, tree);
  const auto kept = read && part.here ? executor_.values().kept(flat)
                                      : std::vector<std::pair<int64_t, int64_t>>();
  for (exec::Slot& slot : flat.slots) {
    if (read) {
      read_kept(slot, kept, *tree.init, full);
      if (!is_tile(slot, tree)) tree.init->drop(slot.param);
    } else {
      at::Tensor initial = initial_values(slot, tree);
      if (slot.is_cut()) initial = cut_values(slot, initial, label);
      full.narrow(0, slot.offset, slot.numel).copy_(initial.reshape({-1}));
    }
    give_window(slot, flat.dtype, tree);
  }
  if (!cut && !read) {  // cut parameters were broadcast one by one
    at::Tensor sent = narrow ? full.to(device::scalar_type(flat.dtype)) : full;
    broadcast(label, sent);
    if (narrow) full.copy_(sent);
  }
  return full;
}

// [all ranks] Returns this rank's part of rank 0's values of a cut parameter.
at::Tensor Adoption::cut_values(const exec::Slot& slot, const at::Tensor& initial,
                                const std::string& label) {
  const at::Tensor whole = initial.to(at::kCPU, at::kFloat).clone(at::MemoryFormat::Contiguous);
  broadcast(concat(label, " ", slot.name), whole);
  return executor_.values().part_of(slot, whole);
}

// A moved or cast buffer stays the same tensor object, so that modules continue to share it.
void Adoption::take_buffers(const ModelTree& tree, const Config& config) {
  for (size_t i = 0; i < tree.buffers.size(); ++i) {
    const at::Tensor& own = tree.buffers[i].buffer;
    at::Tensor buffer = own.cpu().contiguous();
    broadcast(concat("buffer ", i), buffer);
    const at::ScalarType dtype = buffer_dtype(config, tree, tree.buffers[i]);
    const c10::Device where = tree.device.value_or(own.device());
    if (where == own.device() && !buffer.is_same(own)) own.copy_(buffer);
    if (where == own.device() && dtype == own.scalar_type()) continue;
    cast_.emplace_back(own, own.detach());
    device::set_data(own, (where == own.device() ? own.detach() : buffer).to(where, dtype));
  }
}

}  // namespace penstock::engine
