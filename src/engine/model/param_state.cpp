// Values: reads and replaces the optimizer state of one parameter (fp32 master and moments) between
// steps, as a full tensor or as this rank's part. As for a checkpoint, ckpt::holdings() finds the
// buffers, so tables, tiers and tiles need no code here.
#include "src/engine/model/values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/text.h"
#include "src/ckpt/inventory.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"
#include "src/device/wire_codec.h"
#include "src/engine/model/held_units.h"
#include "src/engine/model/residual_state.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/window_agreement.h"

namespace penstock {

namespace {

using ckpt::Holding;

constexpr const char* kParam = "param";           // role name of masters
constexpr int64_t kMostSteps = int64_t{1} << 24;  // fp32 has every whole number up to it
constexpr const char* kStep = "step";             // role name of a parameter's number of updates

// Elements of the parameter that this rank holds, beginning at `begin`.
struct OwnedRange {
  int64_t begin = 0;
  std::vector<float> values{};
};

char* bytes_of(std::vector<float>& values) { return reinterpret_cast<char*>(values.data()); }

}  // namespace

// The state of one parameter in one role, for one call.
struct Values::ParamState {
  Core::State& state;
  const std::string& name;
  const std::string& role;
  std::vector<int64_t> shape{};
  std::vector<Holding> found{};  // the buffers with this state, in order

  ParamState(Core::State& core, const std::string& param, const std::string& wanted)
      : state(core), name(param), role(wanted) {
    state.check_open("state");
    engine::refuse_in_pass(state.passes, "state");
    if (state.driver->holds())
      throw RuntimeFault(
          "[engine::state] this call does not work inside gathered(). Leave the block first");
    state.executor->updates().finish();
    state.border->look_at_params();
    take_edits();
    const std::vector<std::string> moments = {kind().moments.begin(), kind().moments.end()};
    const int rank = state.group->rank();
    for (Holding& one : ckpt::holdings(*state.executor, rank, moments, !state.lent.empty())) {
      const std::vector<ckpt::StatePiece> all = ckpt::pieces(one, 0, one.flat->numel, names());
      const auto mine = std::find_if(all.begin(), all.end(), [&](const ckpt::StatePiece& piece) {
        return piece.global.name == name;
      });
      if (mine == all.end()) continue;
      shape = mine->global.shape;
      if (one.role == role) found.push_back(std::move(one));
    }
    for (exec::UnitState& unit : state.executor->units()) {  // parameters of other stages
      for (const exec::Flat& flat : unit.away) {
        for (const exec::Slot& slot : flat.slots) {
          if (slot.name == name) shape = slot.whole;
        }
      }
    }
  }

  // With deltas, edits must be taken now, because masters do not show later what was edited.
  void take_edits() const {
    if (!state.executor->table().keeps_base()) return;
    const std::vector<exec::UnitState>& units = state.executor->units();
    for (size_t unit = 0; unit < units.size(); ++unit) {
      const bool has = std::ranges::any_of(units[unit].flats, [&](const exec::Flat& flat) {
        return std::ranges::any_of(flat.slots, [&](const exec::Slot& slot) {
          return state.tiled->whole_of(static_cast<int>(unit), slot.name).first == name;
        });
      });
      if (has) state.executor->values().take_edits(static_cast<int>(unit));
    }
  }

  ckpt::GlobalOf names() const {
    return [this](int unit, const exec::Slot& slot) -> ckpt::Global {
      const auto [whole, begin] = state.tiled->whole_of(unit, slot.name);
      const tiles::TiledWeight* tiled = nullptr;
      for (const tiles::TiledWeight& one : state.tiled->all()) {
        if (one.name == whole) tiled = &one;
      }
      return {whole, tiled == nullptr ? slot.whole : tiled->whole.sizes().vec(), begin};
    };
  }

  const OptimizerKind& kind() const {
    return kind_of(state.config.optimizer.value_or(OptimizerConfig{}).type);
  }

  void check_role() const {
    const bool known = std::count(kind().moments.begin(), kind().moments.end(), role) > 0;
    if (role == kParam || (known && !role.empty())) return;
    if (is_count()) {
      throw ConfigError(
          "[engine::local_state] \"step\" is one number for the full parameter. Use "
          "param_state() and set_param_state()");
    }
    throw ConfigError(concat("[engine::state] the optimizer keeps no \"", role, "\""));
  }

  // [all ranks] Throws ConfigError on every rank if no rank has this state.
  void check_known() const {
    const std::string mine = (is_count() ? slots().empty() : found.empty()) ? "0" : "1";
    const std::vector<std::string> all = state.executor->share("state of " + role, mine);
    if (std::count(all.begin(), all.end(), "1") == 0) throw unknown();
  }
  ConfigError unknown() const {
    return ConfigError(concat("[engine::state] the engine keeps no \"", role, "\" of \"", name,
                              "\": the parameter is frozen, or the optimizer has no such state"));
  }

  bool is_count() const { return role == kStep && kind().counts_steps && state.lent.empty(); }

  // Returns the places of the parameter in flats of this rank's stage.
  std::vector<exec::Slot*> slots() const {
    std::vector<exec::Slot*> own;
    std::vector<exec::UnitState>& units = state.executor->units();
    for (size_t unit = 0; unit < units.size(); ++unit) {
      for (exec::Flat& flat : units[unit].flats) {
        for (exec::Slot& slot : flat.slots) {
          const bool named = names()(static_cast<int>(unit), slot).name == name;
          if (named && flat.trainable) own.push_back(&slot);
        }
      }
    }
    return own;
  }

  // [all ranks] Returns the number of updates of the parameter, as a scalar in fp32.
  at::Tensor count() const {
    const std::vector<exec::Slot*> own = slots();
    const std::string mine = own.empty() ? "" : std::to_string(own.front()->updates);
    for (const std::string& one : engine::share_text(*state.executor, "state step", mine)) {
      if (!one.empty()) return at::full({}, std::stod(one), at::TensorOptions(at::kFloat));
    }
    throw unknown();
  }

  // [all ranks] Returns what the residual still adds to the averaged gradient of an update.
  at::Tensor residual() {
    const std::vector<std::string> known =
        state.executor->share("state of residual", slots().empty() ? "0" : "1");
    const bool trains = std::count(known.begin(), known.end(), "1") > 0;
    if (!trains || !state.executor->table().keeps_residual()) throw unknown();
    const engine::ResidualState residuals(*state.executor, state.group->rank(),
                                          engine::residual_divisor(state.config));
    const engine::FlatParts parts = residuals.parts();
    found.clear();
    for (const auto& part : parts) {
      part->shape.memory = tiers().host.take(part->shape.bytes(), mem::Account::kBuffers);
      device::copy(part->shape.data(), part->values.data_ptr(), part->shape.bytes());
      found.push_back(part->holding);
    }
    return whole();
  }

  void set_count(double value) const {
    for (exec::Slot* slot : slots()) slot->updates = slot->squared = static_cast<int64_t>(value);
  }

  // Calls action(holding, piece) for the elements that this rank holds. If `once` is set and
  // several ranks hold an element, only one of these ranks visits the element.
  template <class Action>
  void for_each(bool once, const Action& action) {
    for (Holding& one : found) {
      const auto [from, to] = once
                                  ? ckpt::share_of(one, state.executor->mesh(), state.group->rank())
                                  : std::pair<int64_t, int64_t>{0, one.numel()};
      for (const ckpt::StatePiece& piece :
           ckpt::pieces(one, one.first + from, to - from, names())) {
        if (piece.global.name == name && piece.numel > 0) action(one, piece);
      }
    }
  }

  // Calls `action` with the buffer's values in memory. If the buffer rests on disk, reads it first.
  template <class Action>
  void with_values(Holding& one, const Action& action) {
    mem::DiskTraffic& traffic = state.executor->traffic();
    traffic.fetch(*one.buffer, one.account);
    traffic.wait_read(*one.buffer);
    action();
  }

  mem::Tiers& tiers() { return state.tiers; }

  // Returns a quantized buffer's values in fp32, in host memory.
  static at::Tensor decoded(const exec::Buffer& buffer) {
    return device::decoded(buffer.data(), buffer.dtype, Dtype::kFp32, buffer.numel, nullptr);
  }

  // Copies user edits of low-precision parameters to their fp32 values in host memory.
  static void take_edits(void* values, const exec::Buffer& edits, int64_t first, int64_t numel) {
    const at::Tensor seen = device::brought(edits.at(first), edits.dtype, numel, nullptr);
    device::take_edits(values, Dtype::kFp32, device::address_of(seen, nullptr), edits.dtype, numel);
  }

  std::vector<OwnedRange> read(bool once) {
    std::vector<OwnedRange> all;
    const Holding* decoded_of = nullptr;
    at::Tensor values;
    for_each(once, [&](Holding& one, const ckpt::StatePiece& piece) {
      with_values(one, [&] {
        OwnedRange& part = all.emplace_back();
        part.begin = piece.global.begin;
        part.values.resize(static_cast<size_t>(piece.numel));
        if (one.flat->quantized) {
          if (std::exchange(decoded_of, &one) != &one) values = decoded(*one.buffer);
          std::memcpy(part.values.data(),
                      static_cast<const float*>(values.const_data_ptr()) + (piece.at - one.first),
                      static_cast<size_t>(piece.numel) * 4);
        } else {
          device::take(bytes_of(part.values), Dtype::kFp32, one.buffer->at(piece.at - one.first),
                       one.buffer->dtype, piece.numel, false);
        }
        if (!tiers().computes.is_host()) tiers().computes.synchronize();
        if (one.edits != nullptr) {
          take_edits(bytes_of(part.values), *one.edits, piece.at - one.edits_first, piece.numel);
        }
        state.executor->traffic().let_go(*one.buffer);
      });
    });
    return all;
  }

  at::Tensor whole() {
    std::string mine;
    for (const OwnedRange& part : read(true)) {
      const int64_t head[] = {part.begin, static_cast<int64_t>(part.values.size())};
      mine.append(reinterpret_cast<const char*>(head), sizeof(head));
      mine.append(reinterpret_cast<const char*>(part.values.data()), part.values.size() * 4);
    }
    const int64_t length = static_cast<int64_t>(mine.size());
    int64_t longest = 0;
    for (const std::string& other : state.executor->share(
             "state length", {reinterpret_cast<const char*>(&length), sizeof(length)})) {
      int64_t one = 0;
      std::memcpy(&one, other.data(), sizeof(one));
      longest = std::max(longest, one);
    }
    mine.resize(static_cast<size_t>(longest) + sizeof(int64_t) * 2, '\0');  // zeros mark the end
    at::Tensor full = at::zeros(shape, at::TensorOptions(at::kFloat));
    auto* const to = static_cast<float*>(full.data_ptr());
    for (const std::string& other : state.executor->share("state of " + name, mine)) {
      for (size_t at = 0; at + sizeof(int64_t) * 2 <= other.size();) {
        int64_t head[2];
        std::memcpy(head, other.data() + at, sizeof(head));
        if (head[1] == 0) break;
        at += sizeof(head);
        std::memcpy(to + head[0], other.data() + at, static_cast<size_t>(head[1]) * 4);
        at += static_cast<size_t>(head[1]) * 4;
      }
    }
    return full;
  }

  // Throws on all ranks alike. A value that is not finite would make its whole block NaN.
  void refuse_nonfinite(const float* full) const {
    const bool quantized = std::any_of(found.begin(), found.end(),
                                       [](const Holding& one) { return one.flat->quantized; });
    const int64_t numel = c10::multiply_integers(shape);
    if (!quantized || device::host::first_nonfinite(full, Dtype::kFp32, numel) < 0) return;
    throw ConfigError(concat("[engine::set_param_state] \"", name,
                             "\" rests quantized (quantize.dtype), so each of its values must be "
                             "finite"));
  }

  // [all ranks] Replaces this rank's elements by the elements of `full`, the full tensor in fp32.
  void write(const float* full) {
    refuse_nonfinite(full);
    state.driver->abandon(true);  // frees working copies, which have the old values
    std::vector<const exec::Flat*> done;
    for (Holding& one : found) {
      const bool master = one.account == mem::Account::kOptim && role == kParam;
      if (!master) {
        write_buffer(one, full);
      } else if (std::find(done.begin(), done.end(), one.flat) == done.end()) {
        done.push_back(one.flat);
        write_masters(one, full);
      }
    }
    state.executor->traffic().settle();
    // As in torch, the first step of SGD does not replace a momentum that was set before it.
    if (role == kParam || kind().counts_steps) return;
    for (exec::Slot* slot : slots()) slot->updates = std::max<int64_t>(slot->updates, 1);
  }

 private:
  void put(Holding& one, const float* full, device::Address to, Dtype dtype, int64_t first) {
    for (const ckpt::StatePiece& piece : ckpt::pieces(one, one.first, one.numel(), names())) {
      if (piece.global.name != name || piece.numel == 0) continue;
      device::take(to + (piece.at - first) * dtype_bytes(dtype), dtype,
                   const_cast<float*>(full) + piece.global.begin, Dtype::kFp32, piece.numel, false);
    }
  }

  void write_buffer(Holding& one, const float* full) {
    with_values(one, [&] {
      state.executor->traffic().changes(*one.buffer);
      if (one.flat->quantized) {
        const at::Tensor values = decoded(*one.buffer);
        put(one, full, device::address_of(values, nullptr), Dtype::kFp32, one.first);
        const device::Device* const where = one.buffer->data().device;
        const at::Tensor sent = device::brought(device::address_of(values, nullptr), Dtype::kFp32,
                                                values.numel(), where);
        device::recode(one.buffer->data(), one.buffer->dtype, device::address_of(sent, where),
                       Dtype::kFp32, values.numel());
      } else {
        put(one, full, one.buffer->data(), one.buffer->dtype, one.first);
      }
      state.executor->traffic().put_back(*one.buffer);
      state.executor->traffic().settle();
    });
    if (one.account == mem::Account::kParam) state.executor->values().show(*one.flat);
  }

  // Writes the masters of a flat. The resting parameters are made from all masters of the flat. So
  // this call reads all masters and replaces the elements of this parameter.
  void write_masters(const Holding& first, const float* full) {
    std::vector<Holding*> parts;
    int64_t numel = 0;
    for (Holding& one : found) {
      if (one.flat != first.flat) continue;
      parts.push_back(&one);
      numel += one.numel();
    }
    std::vector<float> masters(static_cast<size_t>(numel));
    for (Holding* one : parts) {
      float* const to = masters.data() + (one->first - first.first);
      with_values(*one, [&] {
        if (!tiers().computes.is_host()) tiers().computes.synchronize();
        device::copy(to, one->buffer->data(), one->buffer->bytes());
        if (!tiers().computes.is_host()) tiers().computes.synchronize();
        if (one->edits != nullptr) {
          take_edits(to, *one->edits, one->first - one->edits_first, one->numel());
        }
        state.executor->traffic().let_go(*one->buffer);
      });
      put(*one, full, to, Dtype::kFp32, one->first);
    }
    state.executor->values().restore(first.unit, *first.flat, first.place, bytes_of(masters));
  }
};

at::Tensor Values::state(const std::string& param, const std::string& role) {
  ParamState one(*state_, param, role);
  if (one.is_count()) return one.count();
  if (role == engine::kResidualRole) return one.residual();
  one.check_known();
  return one.whole();
}

void Values::set_state(const std::string& param, const std::string& role,
                       const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  ParamState one(*state_, param, role);
  one.check_known();
  std::string problem;
  if (one.is_count()) {
    const double count = values.numel() == 1 ? values.item<double>() : -1.0;
    if (!(count >= 0 && count <= kMostSteps && count == std::floor(count))) {
      problem =
          concat("[engine::set_state] \"step\" must be one whole number from 0 to ", kMostSteps);
    }
  } else if (values.sizes() != at::IntArrayRef(one.shape)) {
    problem = concat("[engine::set_state] \"", param, "\" has shape ", at::IntArrayRef(one.shape),
                     ", but the values have ", values.sizes());
  }
  problem = engine::first_problem(*state_->executor, "set state", problem);
  if (!problem.empty()) throw ConfigError(problem);
  // This is a copy, because the user may change pinned memory while it is sent to a device.
  const at::Tensor full =
      values.to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  const uint64_t hash = hash_text({static_cast<const char*>(full.const_data_ptr()), full.nbytes()});
  const std::vector<std::string> all = state_->executor->share(
      "set state values", {reinterpret_cast<const char*>(&hash), sizeof(hash)});
  if (std::count(all.begin(), all.end(), all.front()) != static_cast<int64_t>(all.size())) {
    throw ConfigError(concat("[engine::set_state] some ranks were given values of \"", param,
                             "\" that differ from those of rank 0. Pass the same values on every "
                             "rank"));
  }
  if (one.is_count()) return one.set_count(full.item<double>());
  one.write(static_cast<const float*>(full.const_data_ptr()));
}

std::pair<int64_t, at::Tensor> Values::local_state(const std::string& param,
                                                   const std::string& role) {
  ParamState one(*state_, param, role);
  one.check_role();
  const std::vector<OwnedRange> parts = one.read(false);
  int64_t numel = 0;
  for (const OwnedRange& part : parts) {
    if (part.begin != parts.front().begin + numel) {
      throw ConfigError(
          concat("[engine::local_state] this rank has several pieces of \"", param,
                 "\", which is in tiles or cut over tensor ranks. Use the full tensor instead"));
    }
    numel += static_cast<int64_t>(part.values.size());
  }
  at::Tensor values = at::empty({numel}, at::TensorOptions(at::kFloat));
  auto* to = static_cast<float*>(values.data_ptr());
  for (const OwnedRange& part : parts) to = std::copy(part.values.begin(), part.values.end(), to);
  return {parts.empty() ? 0 : parts.front().begin, values};
}

void Values::set_local_state(const std::string& param, const std::string& role,
                             const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const auto [begin, now] = local_state(param, role);
  ParamState one(*state_, param, role);
  one.check_known();
  std::string problem;
  if (values.numel() != now.numel()) {
    problem = concat("[engine::set_local_state] this rank has ", now.numel(), " elements of \"",
                     param, "\" from element ", begin, ", but was given ", values.numel());
  }
  problem = engine::first_problem(*state_->executor, "set local state", problem);
  if (!problem.empty()) throw ConfigError(problem);
  at::Tensor full = at::zeros(one.shape, at::TensorOptions(at::kFloat));
  full.flatten().narrow(0, begin, now.numel()).copy_(values.flatten());
  one.write(static_cast<const float*>(full.const_data_ptr()));
}

}  // namespace penstock
