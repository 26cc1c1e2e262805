// Core::State: from a model to flat buffers, hooks and plans.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
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

bool trains_in_fp16(const Config& config, const ModelTree& tree) {
  return std::any_of(tree.params.begin(), tree.params.end(), [&](const ParamInfo& info) {
    return info.param.requires_grad() && engine::compute_dtype(config, info) == Dtype::kFp16;
  });
}

}  // namespace

Core::State::State(const ModelTree& tree, const Config& settings, std::shared_ptr<Group> ranks,
                   bool external_optimizer)
    : config(settings),
      group(std::move(ranks)),
      tiers(c10::Device(c10::DeviceType::CPU)),
      loss_scale(settings.loss_scale, trains_in_fp16(settings, tree)) {
  config.resolve(group->size());
  check_devices(tree);
  const Mesh mesh = engine::mesh_of(config);
  const std::vector<engine::UnitSpec> specs = engine::find_units(tree, config.units);
  std::vector<exec::UnitState> units = engine::lay_out(tree, specs, config, mesh.data());
  for (const engine::UnitSpec& spec : specs) unit_modules.push_back(spec.module);
  for (const exec::UnitState& unit : units) unit_names.push_back(unit.name);
  model = engine::describe(units);
  const Table table = engine::table_of(config, model);
  if (config.offload.late_update && !table.moves_params()) {
    throw ConfigError(
        concat("[engine::initialize] offload.late_update needs parameters that rest sharded, which "
               "strategy \"",
               config.strategy, "\" has not: allowed with zero3, hpz, mics"));
  }
  const std::string print = engine::fingerprint(units);
  executor.emplace(table, mesh, *group, tiers, std::move(units));
  driver.emplace(*executor);
  moves_params = executor->moves_params();
  try {
    adopt(tree, print, external_optimizer);
  } catch (...) {  // the parameters must not keep windows into memory that goes
    for (exec::UnitState& unit : executor->units()) {
      for (exec::Flat& flat : unit.flats) flat.let_params_go();
    }
    tiers.disk.reset();
    throw;
  }
  waiting.assign(executor->units().size(), 0);
  make_plans();
}

void Core::State::adopt(const ModelTree& tree, const std::string& print, bool external_optimizer) {
  agree_at_start(print);
  claim_copies(external_optimizer);
  for (size_t unit = 0; unit < executor->units().size(); ++unit) {
    std::vector<exec::Flat>& flats = executor->units()[unit].flats;
    for (size_t flat = 0; flat < flats.size(); ++flat) {
      adopt_flat(flats[flat], concat("initial u", unit, ".", flat), tree);
      mem::trim_heap(2 * flats[flat].numel * 4);
    }
  }
  for (size_t i = 0; i < tree.buffers.size(); ++i) {
    at::Tensor buffer = tree.buffers[i].contiguous();
    executor->broadcast(concat("buffer ", i), buffer.data_ptr(),
                        static_cast<int64_t>(buffer.nbytes()));
    if (!tree.buffers[i].is_contiguous()) tree.buffers[i].copy_(buffer);
  }
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

// Says where each copy rests, and finds a disk that is too full before anything is moved.
void Core::State::claim_copies(bool external_optimizer) {
  const Table& table = executor->table();
  const Mesh& mesh = executor->mesh();
  const Placement& rest = table.at(Role::kParam, Phase::kRest);
  const Placement& optim = table.at(Role::kOptim, Phase::kRest);
  const bool on_disk = rest.tier == Tier::kDisk || optim.tier == Tier::kDisk;
  if (external_optimizer && optim.tier == Tier::kDisk) {
    throw ConfigError(
        "[engine::initialize] offload.optimizer \"disk\" needs one of the engine's optimizers: an "
        "optimizer of your own steps on state in memory, so set it to \"host\"");
  }
  if (table.at(Role::kParam, Phase::kHold).tier == Tier::kDisk &&
      !(table.at(Role::kParam, Phase::kHold) == rest)) {
    throw ConfigError(
        "[engine::initialize] offload.params \"disk\" keeps no second copy there: use strategy "
        "\"zero3\" or \"mics\", or offload.params \"host\"");
  }
  if (on_disk) {
    mem::DiskOptions options;
    options.paths = split(config.offload.path, ':');
    if (config.offload.path.empty()) options.paths = {std::filesystem::temp_directory_path()};
    tiers.disk.emplace(options);
  }
  const int num_moments = external_optimizer ? 0 : engine::num_moments(config);
  const auto claim = [&](exec::Stored& copy, const Placement& place, int64_t bytes) {
    copy.bytes = bytes;
    copy.tier = place.tier;
    if (copy.on_disk()) copy.offset = tiers.disk->reserve(bytes);
  };
  for (exec::UnitState& unit : executor->units()) {
    for (exec::Flat& flat : unit.flats) {
      claim(flat.rest, rest, flat.numel / num_shards(rest, mesh) * flat.element_bytes());
      if (!flat.trainable) continue;
      const int64_t bytes = flat.numel / num_shards(optim, mesh) * 4;
      if (table.has_master(flat.dtype)) claim(flat.master, optim, bytes);
      if (num_moments > 0) claim(flat.exp_avg, optim, bytes);
      if (num_moments > 1) claim(flat.exp_avg_sq, optim, bytes);
    }
  }
  if (on_disk) tiers.disk->allocate();
}

// Rank 0's values become the resting copy, the master shard and the parameter's window.
void Core::State::adopt_flat(exec::Flat& flat, const std::string& label, const ModelTree& tree) {
  const Table& table = executor->table();
  const Mesh& mesh = executor->mesh();
  at::Tensor full = at::zeros({flat.numel}, at::TensorOptions(at::kFloat));
  auto* values = static_cast<float*>(full.data_ptr());
  for (exec::Slot& slot : flat.slots) {
    const bool hollow = tree.init && tree.init->holds(slot.param);
    const at::Tensor initial = hollow ? tree.init->take(slot.param) : slot.param.detach();
    full.narrow(0, slot.offset, slot.numel).copy_(initial.reshape({-1}));
    engine::own_storage(slot.param, flat.dtype);
  }
  executor->broadcast(label, values, flat.numel * 4);
  const auto part = [&](const Placement& place) {
    return values +
           shard_index(place, mesh, group->rank()) * (flat.numel / num_shards(place, mesh));
  };
  exec::DiskTraffic& traffic = executor->traffic();
  traffic.make_room(flat.rest, mem::Account::kParam);
  optim::take(flat.rest.data(), flat.dtype, part(table.at(Role::kParam, Phase::kRest)),
              Dtype::kFp32, flat.rest.bytes / flat.element_bytes(), false);
  traffic.put_back(flat.rest);
  if (moves_params) {
    flat.detach();
  } else {
    flat.attach(flat.rest.data());
  }
  for (exec::Stored* copy : flat.optimizer_state()) {
    if (!copy->exists()) continue;
    traffic.settle();  // one of them in memory, beside the full values
    traffic.make_room(*copy, mem::Account::kOptim);
    if (copy == &flat.master) {
      std::memcpy(copy->data(), part(table.at(Role::kOptim, Phase::kUpdate)), copy->bytes);
    } else {
      std::memset(copy->data(), 0, copy->bytes);
    }
    traffic.put_back(*copy);
  }
  traffic.settle();
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
    driver->set_plan(section, fuse(prefetch(read_ahead(plan), model, config.prefetch_bytes), model,
                                   config.comm.bucket_bytes));
  }
}

}  // namespace penstock
