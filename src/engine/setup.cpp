// Core::State: from a model to flat buffers, hooks and plans.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/adopt.h"
#include "src/engine/choice.h"
#include "src/engine/room.h"
#include "src/engine/state.h"
#include "src/engine/strategy.h"
#include "src/engine/units.h"
#include "src/optim/kernels.h"

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
      loss_scale(settings.loss_scale, trains_in_fp16(settings, tree)) {
  config.resolve(group->size());
  check_devices(tree);
  engine::Split split = engine::split_large(tree, config);
  tiled = std::move(split.tiled);
  const Mesh mesh = engine::mesh_of(config);
  const std::vector<engine::UnitSpec> specs = engine::find_units(split.tree, config.units);
  std::vector<exec::UnitState> units = engine::lay_out(split.tree, specs, config, mesh.data());
  for (const engine::UnitSpec& spec : specs) unit_modules.push_back(spec.module);
  for (const exec::UnitState& unit : units) unit_names.push_back(unit.name);
  model = engine::describe(units);
  engine::assume_order(model, split.tree, specs);
  engine::mark_recomputed(config, model);
  const Room room = agree_at_start(tree, engine::fingerprint(units));
  choose_tiers(room, external_optimizer);
  set_budgets(room, external_optimizer);
  const Table table = engine::table_of(config, model);
  if (config.offload.late_update && !table.moves_params()) {
    throw ConfigError(
        concat("[engine::initialize] offload.late_update needs parameters that rest sharded, which "
               "strategy \"",
               config.strategy, "\" has not: allowed with zero3, hpz, mics"));
  }
  engine::set_chunks(config, table.on(mesh), model);
  assumed = model;
  executor.emplace(table, mesh, *group, tiers, std::move(units));
  driver.emplace(*executor);
  moves_params = executor->moves_params();
  find_tiles();
  unit_events = moves_params || table.moves_activations();
  try {
    adopt(split.tree, external_optimizer);
  } catch (...) {  // the parameters must not keep windows into memory that goes
    for (exec::UnitState& unit : executor->units()) {
      for (exec::Flat& flat : unit.flats) flat.let_params_go();
    }
    tiers.close_disk();
    throw;
  }
  waiting.assign(executor->units().size(), 0);
  make_plans();
}

void Core::State::adopt(const ModelTree& tree, bool external_optimizer) {
  claim_on_all_ranks(external_optimizer);
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
  for (const engine::Tiled& one : tiled) {
    if (tree.init && tree.init->holds(one.whole)) tree.init->take(one.whole);
  }
  let_wholes_go();
}

void Core::State::find_tiles() {
  is_tile.assign(unit_names.size(), false);
  for (engine::Tiled& one : tiled) {
    for (size_t tile = 0; tile + 1 < one.first.size(); ++tile) {
      const std::string name =
          concat(one.name, "[", one.first[tile], ":", one.first[tile + 1], "]");
      const auto found = std::find(unit_names.begin(), unit_names.end(), name);
      PENSTOCK_ASSERT(found != unit_names.end(), concat("[engine::find_tiles] no unit ", name));
      one.units.push_back(static_cast<int>(found - unit_names.begin()));
      is_tile[one.units.back()] = true;
    }
  }
}

at::Tensor Core::State::initial_values(const exec::Slot& slot, const ModelTree& tree) {
  if (!tree.init || !tree.init->holds(slot.param)) return slot.param.detach();
  if (tree.params[slot.index].param.unsafeGetTensorImpl() == slot.param.unsafeGetTensorImpl()) {
    return tree.init->take(slot.param);
  }
  // A tile: the parameter is taken when all its tiles have their values.
  return tree.init->whole(slot.param)
      .narrow(0, slot.param.storage_offset(), slot.param.numel())
      .clone();
}

Core::State::~State() {
  try {
    close(false);
  } catch (const std::exception&) {
    // A destructor has nobody to tell; close() is the call that reports.
  }
}

// The ranks compare models and configs, and tell each other what memory they found.
Room Core::State::agree_at_start(const ModelTree& tree, const std::string& print) {
  comm::Channel channel(*group, "start");
  comm::Members all{{}, group->rank()};
  for (int rank = 0; rank < group->size(); ++rank) all.ranks.push_back(rank);
  const engine::Found mine = engine::find_room(config, tree, group->size());
  std::vector<std::string> texts =
      engine::share_text("model and config", concat(mine.text(), "\n", config.lines(), print),
                         [&](const std::string& label, const std::string& payload) {
                           return channel.share(label, all, payload);
                         });
  std::vector<engine::Found> by_rank;
  for (std::string& text : texts) {
    const size_t line = text.find('\n');
    by_rank.push_back(engine::Found::parse(text.substr(0, line)));
    text.erase(0, line + 1);
  }
  const std::string difference = engine::first_difference(texts);
  if (difference.empty()) return engine::room_of(config.memory, by_rank);
  throw RuntimeFault(
      concat("[engine::initialize] the ranks have different models or configs: ", difference));
}

// Where the config leaves tiers open, takes the best; what cannot fit is refused before anything
// is taken. All ranks alike: they agree on all that counts.
void Core::State::choose_tiers(const Room& room, bool external_optimizer) {
  const bool open = config.offload.optimizer == "auto" || config.offload.params == "auto";
  engine::Question question{
      {config, group->size(), 0, Machine::cpu(), room}, {config.strategy}, external_optimizer};
  // A disk that is too full is found when its space is claimed, with its path.
  if (!open) question.asked.room.disk = Room::kNoLimit;
  const std::vector<Alternative> tried = engine::alternatives(question, model);
  if (tried.empty()) {
    throw ConfigError("[engine::initialize] " + engine::refusal(question, model));
  }
  const Alternative& best = tried.front();
  if (!best.fits) {
    question.asked.config.offload.optimizer = question.asked.config.offload.params = "auto";
    std::vector<Alternative> others = engine::alternatives(question, model);
    question.strategies = preset_names();
    for (const Alternative& other : engine::alternatives(question, model)) others.push_back(other);
    engine::refuse(best, others, question.asked.room);
  }
  if (!open) return;
  config = engine::with(config, best);
  choice = concat("offload chosen: optimizer \"", best.optimizer, "\", params \"", best.params,
                  "\"; each rank has ", room.text(), "\n", engine::choice_text(tried));
  if (group->rank() == 0) std::fputs(choice.c_str(), stderr);
}

void Core::State::set_budgets(const Room& room, bool external_optimizer) {
  engine::Question question{
      {config, group->size(), 0, Machine::cpu(), room}, {config.strategy}, external_optimizer};
  question.asked.config.offload.optimizer = question.asked.config.offload.params = "auto";
  const auto budget = [&](const char* name, int64_t limit, int64_t Alternative::* bytes) {
    const auto advice = [question, bytes, desc = model, now = config.offload] {
      return engine::advice(question, desc, now, bytes);
    };
    return mem::Budget{limit, name, advice};
  };
  tiers.device.set_budget(
      budget("device memory (memory.device_bytes)", room.device, &Alternative::device));
  tiers.host.set_budget(budget("host memory (memory.host_bytes)", room.host, &Alternative::host));
  tiers.memory.set_budget(budget(config.memory.host_bytes < 0
                                     ? "memory found free (memory.host_bytes says otherwise)"
                                     : "device and host memory (memory.host_bytes)",
                                 room.memory, &Alternative::memory));
}

// A rank without room ends all of them here.
void Core::State::claim_on_all_ranks(bool external_optimizer) {
  std::exception_ptr error;
  std::string mine;
  try {
    claim_copies(external_optimizer);
  } catch (const std::exception& problem) {
    error = std::current_exception();
    mine = problem.what();
  }
  const std::vector<std::string> texts = share_text("room for what rests", mine);
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    throw RuntimeFault(concat("[engine::initialize] rank ", rank, " failed with: ", texts[rank]));
  }
}

void Core::State::check_moments(bool external_optimizer) const {
  const Placement& rest = executor->table().at(Role::kOptim, Phase::kRest);
  const Placement& at = executor->table().at(Role::kOptim, Phase::kUpdate);
  if (rest.dtype == Dtype::kFp32 && at.dtype == Dtype::kFp32) return;
  if (rest.dtype != at.dtype || rest.dtype != Dtype::kBf16) {
    throw ConfigError(concat("[engine::initialize] table.optim.rest is ", rest.text(),
                             " and table.optim.update ", at.text(),
                             ": both have the moments' dtype, fp32 or bf16 (set by "
                             "optimizer.moments_dtype); masters are fp32 in any case"));
  }
  const bool adagrad = config.optimizer && config.optimizer->type == "Adagrad";
  if (!external_optimizer && !adagrad) return;
  throw ConfigError(
      concat("[engine::initialize] bf16 moments (optimizer.moments_dtype) need one of "
             "the engine's optimizers AdamW, Adam, SGD and Lion: ",
             adagrad ? "Adagrad's sum only grows and would soon stand still in bf16"
                     : "an optimizer of your own keeps its state itself",
             ", so leave it at \"fp32\""));
}

// Says where each copy rests, and finds a disk that is too full before anything is moved.
void Core::State::claim_copies(bool external_optimizer) {
  const Table& table = executor->table();
  const Mesh& mesh = executor->mesh();
  const Placement& rest = table.at(Role::kParam, Phase::kRest);
  const Placement& optim = table.at(Role::kOptim, Phase::kRest);
  const Placement& held = table.at(Role::kGrad, Phase::kHold);
  const bool on_disk =
      rest.tier == Tier::kDisk || optim.tier == Tier::kDisk || held.tier == Tier::kDisk;
  mem::DiskOptions options;
  options.paths = engine::swap_folders(config.offload);
  options.checksums = config.offload.checksums;
  options.stall_s = config.offload.timeout_s;
  if (on_disk) tiers.disk.emplace(options);
  // How large activations are is known when they are there: their file grows.
  if (table.at(Role::kAct, Phase::kHold).tier == Tier::kDisk) {
    executor->activations().open_disk(options);
  }
  check_moments(external_optimizer);
  const int num_moments = external_optimizer ? 0 : engine::num_moments(config);
  for (size_t u = 0; u < executor->units().size(); ++u) {
    for (exec::Flat& flat : executor->units()[u].flats) {
      flat.rest = claim(rest, flat.numel / num_shards(rest, mesh) * flat.element_bytes());
      if (!flat.trainable) continue;
      if (held.tier == Tier::kDisk) {
        flat.reduced = claim(held, flat.numel / num_shards(held, mesh) *
                                       dtype_bytes(table.dtype_in(held, flat.dtype)));
      }
      claim_chunks(flat, model.units[u].num_chunks, num_moments);
    }
  }
  if (on_disk) tiers.disk->allocate();
}

exec::Stored Core::State::claim(const Placement& place, int64_t bytes) {
  exec::Stored copy;
  copy.bytes = bytes;
  copy.tier = place.tier;
  if (copy.on_disk()) copy.offset = tiers.disk->reserve(bytes);
  return copy;
}

void Core::State::claim_chunks(exec::Flat& flat, int count, int num_moments) {
  const Table& table = executor->table();
  const Placement& optim = table.at(Role::kOptim, Phase::kRest);
  const int64_t owned = flat.numel / num_shards(optim, executor->mesh());
  const auto part_of = [](const exec::Stored& whole, int64_t owned, int64_t begin, int64_t numel) {
    exec::Stored part;
    if (!whole.on_disk()) return part;
    part.tier = whole.tier;
    part.bytes = whole.bytes / owned * numel;
    part.offset = whole.offset + whole.bytes / owned * begin;
    return part;
  };
  for (int index = 0; index < count; ++index) {
    const auto [begin, end] = range_of({index, count}, owned);
    exec::ChunkState chunk;
    chunk.begin = begin;
    chunk.numel = end - begin;
    const int64_t bytes = chunk.numel * dtype_bytes(optim.dtype);
    if (table.has_master(flat.dtype)) chunk.master = claim(optim, chunk.numel * 4);
    if (num_moments > 0) chunk.exp_avg = claim(optim, bytes);
    if (num_moments > 1) chunk.exp_avg_sq = claim(optim, bytes);
    chunk.param = part_of(flat.rest, owned, begin, chunk.numel);
    chunk.gradient = part_of(flat.reduced, owned, begin, chunk.numel);
    flat.chunks.push_back(std::move(chunk));
  }
}

// Rank 0's values become the resting copy, the master shard and the parameter's window.
void Core::State::adopt_flat(exec::Flat& flat, const std::string& label, const ModelTree& tree) {
  const Table& table = executor->table();
  const Mesh& mesh = executor->mesh();
  at::Tensor full = at::zeros({flat.numel}, at::TensorOptions(at::kFloat));
  auto* values = static_cast<float*>(full.data_ptr());
  for (exec::Slot& slot : flat.slots) {
    const at::Tensor initial = initial_values(slot, tree);
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
  for (exec::ChunkState& chunk : flat.chunks) {
    for (exec::Stored* copy : chunk.optimizer_state()) {
      if (!copy->exists()) continue;
      traffic.settle();  // one of them in memory, beside the full values
      traffic.make_room(*copy, mem::Account::kOptim);
      if (copy == &chunk.master) {
        const float* own = part(table.at(Role::kOptim, Phase::kUpdate));
        std::memcpy(copy->data(), own + chunk.begin, copy->bytes);
      } else {
        std::memset(copy->data(), 0, copy->bytes);
      }
      traffic.put_back(*copy);
    }
  }
  traffic.settle();
}

void Core::State::install_hooks() {
  const std::weak_ptr<State> weak = weak_from_this();
  for (size_t u = 0; u < executor->units().size(); ++u) {
    const std::vector<exec::Flat>& flats = executor->units()[u].flats;
    for (size_t f = 0; f < flats.size(); ++f) {
      if (!flats[f].trainable || is_tile[u]) continue;  // tiles' operators hand theirs over
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
    driver->set_plan(section, engine::with_passes(plan, model, config));
  }
}

}  // namespace penstock
