#include "src/engine/wholes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include "src/base/text.h"
#include "src/device/kernels.h"

namespace penstock::engine {

namespace {

// Graphs that were built before go on: autograd's node for the gradient stays, and it is asked when
// the parameter is a part again.
void look_at(const at::Tensor& param, const c10::Storage& storage, at::IntArrayRef sizes) {
  at::Tensor window = at::empty({0}, param.options().requires_grad(false));
  window.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  window.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  param.set_data(window);
}

}  // namespace

template <class Action>
void Wholes::for_each(int unit, const Action& action) {
  for (exec::Flat& flat : executor_.units()[static_cast<size_t>(unit)].flats) {
    if (flat.tensor != TensorCut::kCut) continue;
    for (exec::Slot& slot : flat.slots) action(flat, slot);
  }
}

// A view of it, where it computes.
at::Tensor Wholes::part(const exec::Flat& flat, const exec::Slot& slot) const {
  const Placement& computes = executor_.table().at(Role::kParam, Phase::kForward);
  for (const exec::Copy& copy : flat.params) {
    if (!copy.valid || copy.place != computes) continue;
    return device::view(copy.buffers.front().at(slot.offset), flat.dtype, slot.numel)
        .view(slot.sizes);
  }
  throw Bug(concat("[engine::Wholes] \"", slot.name, "\" is not where it computes"));
}

void Wholes::show(int unit) {
  for_each(unit, [&](exec::Flat& flat, exec::Slot& slot) {
    if (slot.shown) return;
    const at::Tensor whole = executor_.values().whole_of(slot, part(flat, slot));
    look_at(slot.param, whole.storage(), slot.whole);
    slot.shown = true;
    shown_[&slot] = whole;
  });
}

void Wholes::write(int unit) {
  for_each(unit, [&](exec::Flat& flat, exec::Slot& slot) {
    if (!slot.shown) return;
    const at::Tensor whole = slot.param.detach().contiguous();
    executor_.broadcast(concat("written ", slot.name), whole.data_ptr(),
                        static_cast<int64_t>(whole.nbytes()));
    part(flat, slot).copy_(executor_.values().part_of(slot, whole));
  });
}

std::string Wholes::edited(int unit) {
  std::string name;
  for_each(unit, [&](exec::Flat& flat, exec::Slot& slot) {
    if (!slot.shown || !name.empty()) return;
    const at::Tensor seen = executor_.values().part_of(slot, slot.param.detach());
    const at::Tensor kept = part(flat, slot);
    // By bits, so that a NaN is what it was.
    const bool same = seen.sizes() == kept.sizes() && seen.scalar_type() == kept.scalar_type() &&
                      at::equal(seen.contiguous().view(at::kByte), kept.view(at::kByte));
    if (!same) name = slot.name;
  });
  return name;
}

void Wholes::hide(int unit) {
  for_each(unit, [&](exec::Flat&, exec::Slot& slot) {
    if (!slot.shown) return;
    slot.shown = false;
    shown_.erase(&slot);
    look_at(slot.param, slot.window, slot.sizes);
    slot.version = slot.param._version();
  });
}

}  // namespace penstock::engine
