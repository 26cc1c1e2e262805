#include "src/engine/mesh/whole_params.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include "src/base/text.h"
#include "src/ckpt/checksum.h"
#include "src/device/kernels.h"

namespace penstock::engine {

namespace {

// Points a parameter to `storage` without replacing its gradient accumulator. So earlier graphs
// become valid again when the parameter is this rank's part again.
void look_at(const at::Tensor& param, const c10::Storage& storage, at::IntArrayRef sizes) {
  at::Tensor window = at::empty({0}, param.options().requires_grad(false));
  window.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  window.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  param.set_data(window);
}

}  // namespace

// Calls action(part, slot) for each slot whose full tensor this rank does not hold.
template <class Action>
void WholeParams::for_each(int unit, const Action& action) {
  for (const exec::Part& part : executor_.units()[static_cast<size_t>(unit)].parts()) {
    if (part.here && !part.flat->placement.is_sharded()) continue;
    for (exec::Slot& slot : part.flat->slots) action(part, slot);
  }
}

// Returns the copy of the flat that forward and backward use.
const exec::Buffer& WholeParams::computing(const exec::Flat& flat) const {
  const Placement& computes = executor_.table().at(Role::kParam, Phase::kForward);
  for (const exec::Copy& copy : flat.params) {
    if (copy.valid && copy.place == computes) return copy.buffers.front();
  }
  throw Bug(concat("[engine::WholeParams] \"", flat.slots.front().name,
                   "\" has no copy under its forward placement"));
}

// Returns a view of the slot in the copy that forward and backward use.
at::Tensor WholeParams::part(const exec::Flat& flat, const exec::Slot& slot) const {
  return device::view(computing(flat).at(slot.offset), flat.dtype, slot.numel).view(slot.sizes);
}

void WholeParams::show(exec::Slot& slot, const at::Tensor& whole) {
  look_at(slot.param, whole.storage(), slot.whole);
  slot.shown = true;
  shown_[&slot] = {whole, ckpt::checksum(whole)};
}

bool WholeParams::used() const { return exec::divides_model(executor_); }

void WholeParams::show(int unit) {
  exec::GatheredValues& values = executor_.values();
  for (const exec::Part& one : executor_.units()[static_cast<size_t>(unit)].parts()) {
    exec::Flat& flat = *one.flat;
    const bool cut = flat.placement.is_sharded();
    const bool shown = flat.slots.front().shown;
    at::Tensor all;
    if (one.here && !flat.placement.on(Axis::kPipeline).holders.empty()) {
      all = device::view(computing(flat).data(), flat.dtype, flat.numel);
    }
    // A stage does not know whether the flat is already shown on other stages, so every stage takes
    // part.
    all = values.across_stages(flat, all, concat("shown u", unit, ".", flat.number));
    if (shown) continue;
    for (exec::Slot& slot : flat.slots) {
      if (one.here && cut) show(slot, values.whole_of(slot, part(flat, slot)));
      if (one.here) continue;
      const at::Tensor its = all.narrow(0, slot.offset, slot.numel).view(slot.sizes);
      show(slot, values.whole_of(slot, its).to(slot.param.options()).clone());
    }
  }
}

void WholeParams::write(int unit) {
  const bool stages = executor_.mesh().size(Axis::kPipeline) > 1;
  for (const exec::Part& one : executor_.units()[static_cast<size_t>(unit)].parts()) {
    if (!stages && !one.flat->placement.is_sharded()) continue;
    for (exec::Slot& slot : one.flat->slots) {
      if (!stages && !slot.shown) continue;
      const at::Tensor whole = slot.param.detach().cpu().contiguous();
      executor_.broadcast(concat("written ", slot.name), whole.data_ptr(),
                          static_cast<int64_t>(whole.nbytes()));
      if (slot.shown && !slot.param.is_cpu()) slot.param.detach().copy_(whole);
      if (one.here) part(*one.flat, slot).copy_(executor_.values().part_of(slot, whole));
      if (slot.shown) shown_[&slot].hash = ckpt::checksum(slot.param.detach());
    }
  }
}

std::string WholeParams::edited(int unit) {
  std::string name;
  for_each(unit, [&](const exec::Part& one, exec::Slot& slot) {
    if (!slot.shown || !name.empty()) return;
    if (!one.here) {
      if (ckpt::checksum(slot.param.detach()) != shown_[&slot].hash) name = slot.name;
      return;
    }
    const at::Tensor seen = executor_.values().part_of(slot, slot.param.detach());
    const at::Tensor kept = part(*one.flat, slot);
    // Compares bits, so that an unchanged NaN counts as equal.
    const bool same = seen.sizes() == kept.sizes() && seen.scalar_type() == kept.scalar_type() &&
                      at::equal(seen.contiguous().view(at::kByte), kept.view(at::kByte));
    if (!same) name = slot.name;
  });
  return name;
}

void WholeParams::hide(int unit) {
  for_each(unit, [&](const exec::Part&, exec::Slot& slot) {
    if (!slot.shown) return;
    slot.shown = false;
    shown_.erase(&slot);
    look_at(slot.param, slot.window, slot.sizes);
    slot.version = slot.param._version();
  });
}

}  // namespace penstock::engine
