// Core::State: from a model to flat buffers, hooks and plans.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/adopt.h"
#include "src/engine/state.h"
#include "src/engine/strategy.h"
#include "src/engine/units.h"
#include "src/optim/kernels.h"
#include "src/plan/passes.h"

namespace penstock {

namespace {

void check_devices(const ModelTree& tree) {
  for (const ParamInfo& info : tree.params) {
    if (info.param.device().is_cpu()) continue;
    throw ConfigError(concat("[engine::Core] parameter \"", info.name, "\" is on ",
                             info.param.device().str(), "; this version trains on the CPU"));
  }
}

}  // namespace

Core::State::State(const ModelTree& tree, const Config& settings, std::shared_ptr<Group> ranks,
                   bool external_optimizer)
    : config(settings), group(std::move(ranks)), arena(c10::Device(c10::DeviceType::CPU)) {
  config.resolve(group->size());
  check_devices(tree);
  const Mesh mesh = engine::mesh_of(config);
  const Table table = engine::table_of(config);
  const std::vector<engine::UnitSpec> specs = engine::find_units(tree, config.units);
  std::vector<exec::UnitState> units = engine::lay_out(tree, specs, config, mesh.data());
  for (const engine::UnitSpec& spec : specs) unit_modules.push_back(spec.module);
  for (const exec::UnitState& unit : units) unit_names.push_back(unit.name);
  model = engine::describe(units);
  const std::string print = engine::fingerprint(units);
  executor.emplace(table, mesh, *group, arena, std::move(units));
  driver.emplace(*executor);
  moves_params = executor->table().at(Role::kParam, Phase::kRest).sharded();
  agree_at_start(print);
  for (size_t unit = 0; unit < executor->units().size(); ++unit) {
    std::vector<exec::Flat>& flats = executor->units()[unit].flats;
    for (size_t flat = 0; flat < flats.size(); ++flat) {
      adopt_flat(flats[flat], concat("initial u", unit, ".", flat), external_optimizer);
    }
  }
  for (size_t i = 0; i < tree.buffers.size(); ++i) {
    at::Tensor buffer = tree.buffers[i].contiguous();
    executor->broadcast(concat("buffer ", i), buffer.data_ptr(),
                        static_cast<int64_t>(buffer.nbytes()));
    if (!tree.buffers[i].is_contiguous()) tree.buffers[i].copy_(buffer);
  }
  waiting.assign(executor->units().size(), 0);
  make_plans();
}

Core::State::~State() {
  try {
    close(false);
  } catch (const std::exception&) {
    // A destructor has nobody to tell; close() is the call that reports.
  }
}

void Core::State::agree_at_start(const std::string& print) {
  const std::string mine = config.lines() + print;
  const std::string difference = engine::first_difference(share_text("model and config", mine));
  if (difference.empty()) return;
  throw RuntimeFault(
      concat("[engine::initialize] the ranks have different models or configs: ", difference));
}

// Rank 0's values become the resting copy, the master shard and the parameter's window.
void Core::State::adopt_flat(exec::Flat& flat, const std::string& label, bool external_optimizer) {
  const Table& table = executor->table();
  const Mesh& mesh = executor->mesh();
  at::Tensor full = at::zeros({flat.numel}, at::TensorOptions(at::kFloat));
  auto* values = static_cast<float*>(full.data_ptr());
  for (exec::Slot& slot : flat.slots) {
    full.narrow(0, slot.offset, slot.numel).copy_(slot.param.detach().reshape({-1}));
    engine::own_storage(slot.param, flat.dtype);
  }
  executor->broadcast(label, values, flat.numel * 4);
  const auto part = [&](const Placement& place) {
    const int64_t numel = flat.numel / num_shards(place, mesh);
    return std::pair(values + shard_index(place, mesh, group->rank()) * numel, numel);
  };
  const Placement& rest = table.at(Role::kParam, Phase::kRest);
  const auto [params, num_params] = part(rest);
  flat.rest = arena.take(num_params * flat.element_bytes(), mem::Account::kParam);
  optim::take(flat.rest.data(), flat.dtype, params, Dtype::kFp32, num_params, false);
  if (rest.sharded()) {
    flat.detach();
  } else {
    flat.attach(flat.rest.data());
  }
  if (!flat.trainable) return;
  const auto [masters, num_masters] = part(table.at(Role::kOptim, Phase::kUpdate));
  const int64_t bytes = num_masters * 4;
  if (flat.dtype != Dtype::kFp32) {
    flat.master = arena.take(bytes, mem::Account::kOptim);
    std::memcpy(flat.master.data(), masters, bytes);
  }
  const int num_moments = external_optimizer ? 0 : engine::num_moments(config);
  for (mem::Lease* moment : {&flat.exp_avg, &flat.exp_avg_sq}) {
    if (moment == &flat.exp_avg ? num_moments < 1 : num_moments < 2) continue;
    *moment = arena.take(bytes, mem::Account::kOptim);
    std::memset(moment->data(), 0, bytes);
  }
}

void Core::State::install_hooks() {
  const std::weak_ptr<State> weak = weak_from_this();
  for (size_t u = 0; u < executor->units().size(); ++u) {
    const std::vector<exec::Flat>& flats = executor->units()[u].flats;
    for (size_t f = 0; f < flats.size(); ++f) {
      if (!flats[f].trainable) continue;
      for (size_t s = 0; s < flats[f].slots.size(); ++s) {
        hooks.emplace_back(flats[f].slots[s].param, [weak, u, f, s] {
          const auto self = weak.lock();
          if (!self || self->closed) return;
          self->in_hook([&] {
            self->gradient_arrived(static_cast<int>(u), static_cast<int>(f), static_cast<int>(s));
          });
        });
      }
    }
  }
}

void Core::State::make_plans() {
  for (const Section section : engine::kSections) {
    const Plan plan = plan_section(executor->table(), model, executor->mesh(), section);
    driver->set_plan(section, fuse(prefetch(plan, model, config.prefetch_bytes), model,
                                   config.comm.bucket_bytes));
  }
}

}  // namespace penstock
