#include "src/engine/step/outside_edits.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/kernels.h"
#include "src/device/torch_compat.h"
#include "src/engine/model/adoption.h"
#include "src/exec/replica_edits.h"

namespace penstock::engine {

namespace {

at::Tensor hollow_gradient(const at::Tensor& param, const std::string& name) {
  at::Tensor mark = at::empty({0}, param.options().requires_grad(false));
  mark.unsafeGetTensorImpl()->set_sizes_contiguous(param.sizes());
  own_storage(mark, exec::dtype_of(param.scalar_type()), param.sizes());
  device::set_guard(
      *mark.storage().unsafeGetStorageImpl(),
      concat("[engine::gradients] the gradient of \"", name,
             "\" is in the engine, not in .grad. engine.full_grads() reads gradients, "
             "engine.set_grads() replaces them, engine.zero_grad() drops them and engine.step() "
             "applies them. \"clip\" in the config clips them; engine.grad_norm is their norm"));
  return mark;
}

bool is_window(const at::Tensor& param, const exec::Slot& slot) {
  return param.storage().unsafeGetStorageImpl() == slot.window.unsafeGetStorageImpl();
}

// Returns whether tensors other than the parameter use the storage that the engine gave it.
bool shares_storage(const at::Tensor& param, const exec::Slot& slot) {
  return slot.window.use_count() > (is_window(param, slot) ? 2 : 1);
}

// Returns whether other tensors use the storage. If a script once asked for the storage, its Python
// object also holds a reference.
bool has_views(const at::Tensor& param, const exec::Slot& slot) {
  const bool has_object = slot.window.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj() != nullptr;
  return is_window(param, slot) && slot.window.use_count() > (has_object ? 3 : 2);
}

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw RuntimeFault(concat("[engine::parameters] parameter \"", name, "\" ", what));
}

}  // namespace

OutsideEdits::OutsideEdits(exec::Executor& executor, const tiles::TiledWeights& tiled,
                           std::function<bool(int unit)> stays)
    : executor_(executor), stays_(std::move(stays)), looks_(executor.units().size(), 0) {
  const auto known = [this](const std::string& name, const at::Tensor& tensor, bool trainable,
                            const c10::Storage& tiled) {
    params_.push_back(
        {name, tensor, tensor.sizes().vec(), device::python_object(tensor), {}, trainable, tiled});
  };
  // A weight in tiles is one parameter with a place per tile. Any other parameter has one place.
  std::map<int, size_t> tiled_at;
  for (const tiles::TiledWeight& one : tiled.all()) {
    for (const int unit : one.units) tiled_at[unit] = params_.size();
    known(one.name, one.whole, one.trainable, one.whole.storage());
  }
  for (size_t u = 0; u < executor.units().size(); ++u) {
    exec::UnitState& unit = executor.units()[u];
    const auto tile = tiled_at.find(static_cast<int>(u));
    for (exec::Flat& flat : unit.flats) {
      for (exec::Slot& slot : flat.slots) {
        if (tile == tiled_at.end()) known(slot.name, slot.param, flat.trainable, {});
        const size_t at = tile == tiled_at.end() ? params_.size() - 1 : tile->second;
        params_[at].places.push_back({&unit, &flat, &slot});
      }
    }
  }
}

// ---- parameters

void OutsideEdits::look_at_params() {
  for (Param& param : params_) look_at(param);
  for (size_t unit = 0; unit < executor_.units().size(); ++unit) {
    if (!stays_(static_cast<int>(unit))) continue;
    refuse_edit(touched(executor_.units()[unit]), "between forwards");
  }
}

void OutsideEdits::look_at(Param& param) {
  const at::Tensor& tensor = param.tensor;
  const auto [unit, flat, slot] = param.places.front();
  if (device::python_object(tensor) != param.object) {
    refuse(
        param.name,
        "was swapped with another tensor after initialize(), but the engine trains the original. "
        "Copy values instead (inside engine.gathered(write=True)), or close() the engine and "
        "initialize again");
  }
  if (exec::dtype_of(tensor.scalar_type()) != flat->dtype) {
    refuse(param.name,
           concat("was ", dtype_name(flat->dtype), " and has dtype ",
                  at::toString(tensor.scalar_type()),
                  " now, but the engine keeps the dtype of initialize(). Set "
                  "\"precision\" in the config, or close() the engine, convert the model "
                  "and initialize again"));
  }
  if (tensor.device() != slot->window.device()) {
    refuse(param.name, concat("is on ", tensor.device().str(),
                              " now, but the engine keeps the device of initialize(). close() the "
                              "engine, move the model and initialize again"));
  }
  if (tensor.sizes() !=
      (slot->shown ? at::IntArrayRef(slot->whole) : at::IntArrayRef(param.sizes))) {
    refuse(param.name, concat("was ", at::IntArrayRef(param.sizes), " and is ", tensor.sizes(),
                              " now. close() the engine, change the shape and initialize again"));
  }
  if (slot->shown) return;  // the parameter is the full tensor now and not a window (WholeParams)
  const c10::Storage& window = param.tiled ? param.tiled : slot->window;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const bool same = storage == window.unsafeGetStorageImpl() && tensor.storage_offset() == 0 &&
                    tensor.is_contiguous();
  if (!same) return take_over(param);
  if (param.tiled || !unit->attached) return;
  const Placement& whole = executor_.table().at(Role::kParam, Phase::kForward);
  if (storage->_mutable_data_ptr_no_checks().get() !=
      find(flat->params, whole)->one().at(slot->offset).data) {
    refuse(param.name,
           "no longer uses the memory that the engine gave it, for example because of "
           "share_memory_(). The engine cannot use the new memory. Share copies between processes "
           "instead");
  }
}

// Takes over the values of a parameter that was given new memory. Every rank must have assigned the
// same values.
void OutsideEdits::take_over(Param& param) {
  if (param.tiled) {
    refuse(param.name,
           "is in tiles and was given new memory, which the engine cannot use. Write to it "
           "inside engine.gathered(write=True)");
  }
  const auto [unit, flat, slot] = param.places.front();
  if (flat->quantized && unit->attached) {
    refuse(param.name,
           "rests quantized and was given new memory while it is gathered. Write to it inside "
           "engine.gathered(write=True)");
  }
  executor_.updates().finish();
  const at::Tensor values = param.tensor.detach().clone(at::MemoryFormat::Contiguous);
  slot->given = exec::ReplicaEdits::print_of(values);
  const device::Address base = part_from_views(param);
  const device::Address from = device::address_of(values, &executor_.traffic().tiers().computes);
  if (base) {
    device::copy(base + slot->offset * flat->element_bytes(), from,
                 static_cast<int64_t>(values.nbytes()));
    flat->renew_print(*slot);
  }
  executor_.values().write(*flat, slot->offset, slot->numel, from);
}

// Gives the parameter a window again. Other tensors that share its old storage keep that storage
// and its values. Returns the copy into which the window points, or null.
device::Address OutsideEdits::part_from_views(Param& param) {
  const auto [unit, flat, slot] = param.places.front();
  if (shares_storage(param.tensor, *slot)) {
    flat->let_go(*slot, executor_.traffic().tiers().computes);
    own_storage(param.tensor, flat->dtype, param.sizes);
  } else {
    set_window(param.tensor, slot->window, param.tensor.scalar_type(), param.sizes);
  }
  slot->window = param.tensor.storage();
  const Placement& whole = executor_.table().at(Role::kParam, Phase::kForward);
  const device::Address base =
      unit->attached ? find(flat->params, whole)->one().data() : device::Address();
  flat->point(*slot, base);
  return base;
}

void OutsideEdits::keep_views(int unit) {
  for (Param& param : params_) {
    const auto [its, flat, slot] = param.places.front();
    if (its != &executor_.units()[static_cast<size_t>(unit)] || param.tiled || slot->shown)
      continue;
    if (!has_views(param.tensor, *slot)) param.alone = true;
  }
}

void OutsideEdits::leave_views(int unit) {
  for (Param& param : params_) {
    const auto [its, flat, slot] = param.places.front();
    if (its != &executor_.units()[static_cast<size_t>(unit)] || !std::exchange(param.alone, false))
      continue;
    if (its->attached && has_views(param.tensor, *slot)) part_from_views(param);
  }
}

// Returns the first parameter of a gathered unit whose version or sampled values have changed, or
// "".
std::string OutsideEdits::touched(const exec::UnitState& unit) const {
  if (!unit.attached || executor_.table().rests_whole()) return "";
  for (const exec::Flat& flat : unit.flats) {
    for (const exec::Slot& slot : flat.slots) {
      if (slot.param._version() != slot.version || flat.print_differs(slot)) return slot.name;
      // With a lossy wire, new memory counts as an edit: its values may be rounded, and take_over()
      // could not know that later.
      if (!unit.codings.empty() && !is_window(slot.param, slot)) return slot.name;
    }
  }
  return "";
}

std::string OutsideEdits::edited(int index, bool always) {
  const exec::UnitState& unit = executor_.units()[static_cast<size_t>(index)];
  if (!unit.attached || executor_.table().rests_whole()) return "";
  if (const std::string found = touched(unit); !found.empty()) return found;
  // The comparison would copy the resting shard to the device, read it from disk or decode it, so
  // it is made rarely, and at first only once if all values are frozen.
  const Placement& rest = executor_.table().at(Role::kParam, Phase::kRest);
  const bool on_accelerator = !executor_.traffic().tiers().computes.is_host();
  const bool costs = rest.tier == Tier::kDisk || (rest.tier == Tier::kHost && on_accelerator) ||
                     is_quantized(rest.dtype);
  if (costs && !always) {
    const int looks = ++looks_[static_cast<size_t>(index)];
    const bool trains = std::any_of(unit.flats.begin(), unit.flats.end(),
                                    [](const exec::Flat& flat) { return flat.trainable; });
    if (looks > (trains ? 4 : 1) && looks % 32 != 0) return "";
  }
  return executor_.values().edited(index);
}

void OutsideEdits::refuse_edit(const std::string& param, const char* where) {
  if (param.empty()) return;
  refuse(param,
         concat("was changed in place ", where,
                ". It is a gathered copy there, so the change would be lost. Change it inside "
                "`with engine.gathered(write=True):`"));
}

// ---- gradients

OutsideEdits::SeenGradients OutsideEdits::look_at_gradients(bool adds) {
  std::vector<Param*> dropped;
  size_t num_shown = 0;
  for (Param& param : params_) {
    const at::Tensor& gradient = param.tensor.grad();
    if (param.shown) {
      ++num_shown;
      if (!gradient.defined()) dropped.push_back(&param);
    }
    const bool ours = param.shown && gradient.is_same(param.mark);
    if (!param.trainable || !gradient.defined() || ours || (adds && !param.shown)) continue;
    refuse(param.name,
           "was given a .grad by hand, which the engine does not use. Call "
           "engine.set_grads({name: gradient}) after backward() to replace gradients, or "
           "engine.backward() to add to them");
  }
  if (dropped.empty()) return SeenGradients::kKept;
  // If all gradients were dropped, users called zero_grad(), and the caller drops the whole window.
  if (dropped.size() == num_shown) return SeenGradients::kAllDropped;
  for (Param* param : dropped) forget(*param);
  return SeenGradients::kSomeDropped;
}

void OutsideEdits::forget(Param& param) {
  param.shown = false;
  for (const Place& place : param.places) executor_.gradients().forget(*place.flat, *place.slot);
}

void OutsideEdits::show_gradients() {
  for (Param& param : params_) {
    if (!param.trainable || param.shown) continue;
    const bool has = std::any_of(param.places.begin(), param.places.end(),
                                 [](const Place& place) { return place.slot->touched; });
    if (!has) continue;
    if (!param.mark.defined()) param.mark = hollow_gradient(param.tensor, param.name);
    param.tensor.mutable_grad() = param.mark;
    param.shown = true;
  }
}

void OutsideEdits::hide_gradients() {
  for (Param& param : params_) {
    if (!std::exchange(param.shown, false)) continue;
    at::Tensor& gradient = param.tensor.mutable_grad();
    if (gradient.is_same(param.mark)) gradient.reset();
  }
}

bool OutsideEdits::any_bad() const {
  return std::any_of(params_.begin(), params_.end(), [](const Param& param) {
    return std::any_of(param.places.begin(), param.places.end(),
                       [](const Place& place) { return place.slot->bad; });
  });
}

}  // namespace penstock::engine
