// Core::State::close(): gives the model back.
//
// [Note: Closing] All ranks meet without exchanges (Group::last_call), so close() also works after
// a failure. If ranks still wait in exchanges, these are ended, and new connections are made. Then
// each unit's resting parameters (with deltas, its masters) are gathered. Each parameter keeps its
// storage, which gets its own memory, so views that users keep stay views of the parameter. If the
// weights cannot be gathered, reading a parameter without values raises an error. Errors are
// collected and thrown at the end, after all memory is released.
#include <ATen/ops/empty.h>

#include <cstdio>
#include <exception>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/model/adoption.h"
#include "src/engine/model/exposed_tensors.h"
#include "src/engine/step/core_state.h"
#include "src/engine/watch/observer.h"

namespace penstock {

namespace {

// Must be part of the text that State::failed() makes for an error in an update.
constexpr const char* kUpdateRaised = ", where its update raised ";

}  // namespace

// The state of one close().
struct Core::State::Closing {
  State& state;
  const bool gathers;   // whether weights are gathered from other ranks
  bool exact = false;   // whether the masters are gathered, not the parameters at rest
  std::string lost{};   // why gathering or giving back the weights failed
  std::string stale{};  // why buffers were not copied from their stages
  std::string torn{};   // a device collective that was aborted while it published new weights

  std::string drained(bool last = false);
  void discard();
  std::string part(const std::string& why);
  void bring_buffers();
  void give_back(int unit);
  void give_back(int unit, exec::Flat& flat, const at::Tensor& values);
  void give_back_away(exec::Flat& flat, const at::Tensor& values);
  void give_back_cut(exec::Flat& flat, const at::Tensor& values);
  at::Tensor values_of(int unit, int flat);
  at::Tensor sent_across(const exec::Part& part, int unit, int index, const at::Tensor& own);
};

// Waits for all lanes. If `last`, also ends their threads. Returns the error of a lane that failed,
// or "".
std::string Core::State::Closing::drained(bool last) {
  try {
    state.executor->drain(last);
    // If an update did not run, its reads may still be in progress.
    if (state.tiers.disk) state.tiers.disk->wait_for_all();
    return "";
  } catch (const std::exception& error) {  // a call that waited has already thrown it
    return reason(error);
  }
}

void Core::State::Closing::discard() {
  try {
    exec::discard(*state.executor);
  } catch (const std::exception&) {
    // The error is ignored, because the gradients are discarded.
  }
}

// Meets the other ranks, even if some have failed. Returns the error of the first rank that failed,
// or "". The lanes are idle afterwards.
std::string Core::State::Closing::part(const std::string& why) {
  std::string fault = state.faulted ? state.trouble : why;
  if (fault.empty()) fault = state.model_ranks.cut_short();
  if (fault.empty()) fault = drained();
  if (!state.faulted) {
    state.group->set_position(Position::of(concat("step ", state.steps + 1, ", closing its engine",
                                                  why.empty() ? "" : " after ", why)));
  }
  std::string first = fault;
  try {
    if (gathers) {
      first = state.group->last_call(fault);
    } else if (!fault.empty()) {
      state.group->end_exchanges(fault);
    }
    drained();
    if (state.model_ranks.stages) state.model_ranks.stages->close();
    torn = state.group->cut_off_on_device();
    if (gathers || torn.find("publish") == std::string::npos) torn.clear();
    if (gathers && !first.empty()) {
      state.group->renew();
      state.executor->values().renew();
    }
  } catch (const std::exception& error) {
    lost = reason(error);
    drained();
  }
  return first;
}

void Core::State::Closing::bring_buffers() {
  if (!state.model_ranks.stages || !gathers || !lost.empty()) return;
  try {
    state.model_ranks.stages->bring_buffers([this](const auto& label, const auto& payload) {
      return state.executor->share(label, payload);
    });
  } catch (const std::exception& error) {  // close() throws it after releasing everything
    stale = reason(error);
  }
}

// Returns the values of a full flat, in fp32. Returns an undefined tensor if the parameters already
// have their values or the values cannot be gathered.
at::Tensor Core::State::Closing::values_of(int unit, int flat) {
  const bool rests_whole = state.executor->table().rests_whole();
  exec::Flat& kept = state.executor->units()[unit].flats[flat];
  if (exact && kept.trainable && lost.empty()) {
    at::Tensor values = at::empty({kept.numel}, at::kFloat);
    state.executor->values().parameters(unit, flat, static_cast<char*>(values.data_ptr()), true);
    return values;
  }
  if (rests_whole && state.executor->units()[unit].attached) return {};
  if (!rests_whole && !(gathers && lost.empty())) return {};
  return state.executor->values().resting(unit, flat);
}

void Core::State::Closing::give_back(int unit, exec::Flat& flat, const at::Tensor& values) {
  const exec::UnitState& of_flat = state.executor->units()[unit];
  const bool exact = of_flat.attached && of_flat.codings.empty();
  if (!values.defined() && !exact) {
    flat.say_gone();
    return flat.detach();
  }
  if (flat.placement.is_sharded()) return give_back_cut(flat, values);
  for (exec::Slot& slot : flat.slots) {
    if (slot.param.storage().unsafeGetStorageImpl() != slot.window.unsafeGetStorageImpl()) {
      // If users gave the parameter new memory, it keeps that memory.
      flat.let_go(slot, state.tiers.computes);
      continue;
    }
    engine::own_values(slot.param, values.defined() ? values.narrow(0, slot.offset, slot.numel)
                                                    : slot.param.variable_data());
  }
  if (!state.tiled->is_tile(unit)) return;
  state.tiled->return_rows(unit);
  flat.detach();
}

// Makes cut parameters full tensors again, if every rank takes part.
void Core::State::Closing::give_back_cut(exec::Flat& flat, const at::Tensor& values) {
  if (!gathers || !lost.empty()) {
    flat.say_gone();
    return flat.detach();
  }
  for (exec::Slot& slot : flat.slots) {
    slot.guard =
        concat("[exec::guard] this tensor is a view of the part of \"", slot.name,
               "\" that this rank had while its engine was open. The parameter is a full tensor "
               "again: take a new view");
    if (slot.shown) continue;  // already a full tensor: close() was called inside gathered()
    const at::Tensor part =
        values.defined() ? values.narrow(0, slot.offset, slot.numel) : slot.param.variable_data();
    const at::Tensor whole = state.executor->values().whole_of(slot, part).to(slot.param.options());
    engine::set_window(slot.param, whole.storage(), whole.scalar_type(), slot.whole);
  }
  flat.detach();
}

// Gives the parameters of another stage their values, if every rank takes part.
void Core::State::Closing::give_back_away(exec::Flat& flat, const at::Tensor& values) {
  if (!gathers || !lost.empty()) {
    flat.say_gone();
    return flat.detach();
  }
  for (exec::Slot& slot : flat.slots) {
    const at::Tensor part = values.narrow(0, slot.offset, slot.numel).view(slot.sizes);
    const at::Tensor whole =
        state.executor->values().whole_of(slot, part).to(slot.param.options()).clone();
    engine::set_window(slot.param, whole.storage(), whole.scalar_type(), slot.whole);
  }
}

// If only some stages have the flat, sends its values to the other stages.
at::Tensor Core::State::Closing::sent_across(const exec::Part& part, int unit, int index,
                                             const at::Tensor& own) {
  const bool everywhere = part.flat->placement.on(Axis::kPipeline).holders.empty();
  if (!gathers || !lost.empty() || everywhere) return own;
  exec::GatheredValues& values = state.executor->values();
  at::Tensor sent = own;
  if (part.here && !own.defined()) sent = values.resting(unit, index);  // a full resting copy
  const at::Tensor got = values.across_stages(
      *part.flat, sent, concat("last u", unit, ".", part.flat->number, " of its stage"));
  return part.here ? own : got;
}

void Core::State::Closing::give_back(int unit) {
  exec::UnitState& parts = state.executor->units()[unit];
  int index = -1;  // index among this rank's flats
  for (const exec::Part& part : parts.parts()) {
    exec::Flat& flat = *part.flat;
    index += part.here ? 1 : 0;
    try {
      at::Tensor values;
      if (part.here) values = values_of(unit, index);
      values = sent_across(part, unit, index, values);
      if (part.here) {
        give_back(unit, flat, values);
      } else {
        give_back_away(flat, values);
      }
    } catch (const std::exception& error) {  // close() throws it after releasing everything
      if (lost.empty()) lost = reason(error);
      state.tiers.close_disk();
      flat.say_gone();
      flat.detach();
    }
    flat.free();
  }
  parts.leaving.clear();
  parts.gathering.reset();
  state.tiers.device.trim();
  state.tiers.host.trim();
}

std::string Core::State::close(bool gather, const std::string& why) {
  if (closed) return "";
  closed = true;
  if (activation_memory) activation_memory->stop();
  if (faulted) Observer{*this}.dump("close");  // writes the last events before the error
  Observer{*this}.end();
  // A background save reads buffers that are freed below, so it must end first.
  const bool all_come = gather && why.empty() && !faulted;
  const std::string unsaved = all_come ? saver.finish() : saver.finish_alone();
  if (!unsaved.empty()) std::fprintf(stderr, "penstock: save() failed: %s\n", unsaved.c_str());
  const bool deltas = executor->table().keeps_base();  // [Note: Deltas]
  const bool apart = deltas || !executor->table().rests_whole() || exec::divides_model(*executor);
  Closing closing{*this, gather && apart};
  const std::string first = closing.part(why);
  closing.exact = deltas && closing.gathers && first.empty();
  if (gather && closing.lost.empty()) closing.discard();
  closing.bring_buffers();
  outside_reads.reset();
  hooks.clear();
  executor->activations().close();
  executor->caches().close();
  lent.take_back();
  frozen.reset();
  engine::take_back(lent_gradients);
  border->hide_gradients();
  tiled->close();
  // Waits for I/O that still uses the memory of the copies freed below.
  if (!closing.gathers || !closing.lost.empty()) tiers.close_disk();
  for (size_t unit = 0; unit < executor->units().size(); ++unit) {
    closing.give_back(static_cast<int>(unit));
  }
  if (outer) outer->close(gather && first.empty(), first.empty() ? why : first);
  tiers.close_disk();
  executor->traffic().forget();
  tiers.device.trim();
  tiers.host.trim();
  model_ranks.close();
  group->close();
  // A user may keep a closed engine. It needs no threads, and only the last events of the recorder.
  closing.drained(true);
  tiers.recorder->fit();
  if (gather && !closing.lost.empty()) {
    throw RuntimeFault(concat("[engine::close] the weights could not be gathered, so sharded ",
                              "parameters have no values any more: ", closing.lost));
  }
  if (!closing.stale.empty()) throw RuntimeFault(closing.stale);
  if (!closing.torn.empty()) {
    throw RuntimeFault(concat("[engine::close] a rank failed during ", closing.torn, " (", first,
                              "), so some parameters mix values of two steps. Load a checkpoint"));
  }
  if (!gather || first.find(kUpdateRaised) == std::string::npos) return "";
  return concat("a step was cut short (", first,
                "): some parameters have the values from after that step, and the others still "
                "have the values from before it");
}

}  // namespace penstock
