// Core::State: makes flats, hooks and plans from a model.
//
// [Note: Set-up] All decisions are made before the model is changed: the config is resolved, the
// blueprint is drawn, the ranks compare models and configs, and tiers and budgets are chosen.
// Adoption::claim() then reserves all room on all ranks, and Adoption::take() moves the parameters.
// If anything throws before Adoption::commit(), the model is released.
#include <algorithm>
#include <cstdio>
#include <set>
#include <tuple>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/engine/model/adoption.h"
#include "src/engine/model/blueprint.h"
#include "src/engine/model/memory_budget.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/planning.h"
#include "src/engine/watch/observer.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

void check_has_values(const char* kind, const std::string& name, const at::Tensor& tensor) {
  if (!tensor.is_meta()) return;
  throw ConfigError(concat("[engine::Core] ", kind, " \"", name,
                           "\" is on the meta device and has no values. Build the model under "
                           "penstock.init() or on a device, or give it values: to_empty(), or "
                           "penstock.init(weights=...) around the build"));
}

// Returns the device on which the model trains. Throws ConfigError if parameters are on several
// devices and the tree names none, or if a parameter or a buffer has no values.
c10::Device checked_device(const ModelTree& tree) {
  for (const BufferInfo& info : tree.buffers) check_has_values("buffer", info.name, info.buffer);
  for (const ParamInfo& info : tree.params) {
    check_has_values("parameter", info.name, info.param);
    const c10::Device where = info.param.device(), first = tree.params.front().param.device();
    if (tree.device || where == first) continue;
    throw ConfigError(concat("[engine::Core] parameter \"", info.name, "\" is on ", where.str(),
                             " and \"", tree.params.front().name, "\" on ", first.str(),
                             ", but an engine trains on one device per rank. Move the model to one "
                             "device before initialize()"));
  }
  return engine::device_of(tree);
}

// Throws if parameters share elements of one storage.
void check_memory(const ModelTree& tree) {
  struct Extent {
    const void* storage;
    int64_t begin, end;
    const std::string* name;
    bool operator<(const Extent& other) const {
      return std::tie(storage, begin) < std::tie(other.storage, other.begin);
    }
  };
  std::vector<Extent> extents;
  for (const ParamInfo& info : tree.params) {
    if (info.param.numel() == 0 || !info.param.has_storage()) continue;
    int64_t last = 0;
    for (int64_t dim = 0; dim < info.param.dim(); ++dim) {
      last += (info.param.size(dim) - 1) * info.param.stride(dim);
    }
    const int64_t begin = info.param.storage_offset();
    extents.push_back(
        {info.param.storage().unsafeGetStorageImpl(), begin, begin + last + 1, &info.name});
  }
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i) {
    const Extent &one = extents[i - 1], &next = extents[i];
    if (one.storage != next.storage || next.begin >= one.end) continue;
    throw ConfigError(
        concat("[engine::Core] parameters \"", *one.name, "\" and \"", *next.name,
               "\" share memory (one storage). To tie weights, give both modules the same "
               "Parameter object; otherwise clone one of them"));
  }
}

bool trains_in_fp16(const Config& config, const ModelTree& tree) {
  return std::any_of(tree.params.begin(), tree.params.end(), [&](const ParamInfo& info) {
    return info.param.requires_grad() && engine::compute_dtype(config, info) == Dtype::kFp16;
  });
}

// Writes hosts and process ids of all ranks to the board, for `penstock status`.
void meet(Board* board, const std::vector<engine::AvailableMemory>& by_rank) {
  if (board == nullptr) return;
  std::vector<std::string> roster;
  uint64_t run = hash_text("");
  for (const engine::AvailableMemory& found : by_rank) {
    roster.push_back(concat(found.host, " ", found.pid));
    run = hash_text(found.text(), run);
  }
  board->meet(run, join(roster, "\n"));
}

// Only the first node writes about the run. Each node writes its own reports of failures.
void be_silent(Config* config) {
  if (config->comm.report_dir.empty()) config->comm.report_dir = config->monitor.path;
  config->monitor.path.clear();
  config->monitor.console = "none";
}

// Shares a text among all ranks of the group.
std::vector<std::string> share_with(Group& group, const std::string& label,
                                    const std::string& text) {
  comm::Channel channel(group, "start");
  const auto all = Members::all(group.rank(), group.size());
  return engine::share_text(label, text, [&](const std::string& what, const std::string& payload) {
    return channel.share(what, all, payload);
  });
}

// The group of an engine, and that of the nodes if nodes train on their own; else null.
struct RanksOfRun {
  Group* group = nullptr;
  Group* nodes = nullptr;
};

// [all ranks of all nodes] Throws if another node has a problem.
void hear_problems(Group& nodes, const std::string& own) {
  const std::vector<std::string> all = share_with(nodes, "problems of nodes", own);
  for (size_t node = 0; node < all.size() && own.empty(); ++node) {
    if (!all[node].empty()) throw RuntimeFault(concat("node ", node, ": ", all[node]));
  }
}

// [all ranks of all nodes] Compares the nodes' texts, and appends the memory of other nodes' ranks.
void agree_with_nodes(Group& nodes, const std::string& text,
                      std::vector<engine::AvailableMemory>* by_rank) {
  std::string own;
  for (const engine::AvailableMemory& one : *by_rank) own += one.text() + "\n";
  const std::vector<std::string> all = share_with(nodes, "memory of nodes", own);
  for (size_t node = 0; node < all.size(); ++node) {
    if (node == static_cast<size_t>(nodes.rank())) continue;
    for (const std::string& line : split(all[node], '\n')) {
      if (!line.empty()) by_rank->push_back(engine::AvailableMemory::parse(line));
    }
  }
  const std::string difference =
      engine::first_difference(share_with(nodes, "model and config of nodes", text));
  if (difference.empty()) return;
  throw RuntimeFault(
      concat("[engine::initialize] the nodes have different models or configs (a rank here is the "
             "number of a node): ",
             difference));
}

// [all ranks] Compares models and configs, and shares the memory that each rank found.
Room agree(const Config& config, const RanksOfRun& ranks, const ModelTree& tree,
           const std::string& print) {
  Group& group = *ranks.group;
  const engine::AvailableMemory mine = engine::find_room(config, tree);
  // The text omits the device index, which may differ between ranks.
  const std::string device =
      concat("parameters on ", c10::DeviceTypeName(engine::device_of(tree).type()),
             ", collectives on the ", group.device_groups() ? "device" : "host", "\n");
  std::vector<std::string> texts = share_with(
      group, "model and config", concat(mine.text(), "\n", device, config.lines(), print));
  std::vector<engine::AvailableMemory> by_rank;
  for (std::string& text : texts) {
    const size_t line = text.find('\n');
    by_rank.push_back(engine::AvailableMemory::parse(text.substr(0, line)));
    text.erase(0, line + 1);
  }
  meet(group.board(), by_rank);
  const std::string difference = engine::first_difference(texts);
  std::string problem;
  if (!difference.empty()) {
    problem =
        concat("[engine::initialize] the ranks have different models or configs: ", difference);
  }
  if (ranks.nodes != nullptr) hear_problems(*ranks.nodes, problem);
  if (!problem.empty()) throw RuntimeFault(problem);
  if (ranks.nodes != nullptr) agree_with_nodes(*ranks.nodes, texts.front(), &by_rank);
  return engine::room_of(config.memory, by_rank);
}

// To a user's optimizer, the shards of this rank's part would look like shards of the full tensor.
void check_optimizer(const Config& config, bool external) {
  const MeshConfig& mesh = config.mesh;
  for (const auto& [name, ranks] :
       {std::pair{"tensor", mesh.tensor}, {"pipeline", mesh.pipeline}, {"expert", mesh.expert}}) {
    if (ranks == 1 || !external) continue;
    throw ConfigError(
        concat("[engine::Core] \"mesh.", name, "\" is ", ranks,
               ": an optimizer of your own does not work on a part of the model yet. Use one of "
               "those for which \"optimizer\" has a name"));
  }
}

// Returns the sequence ranks of `rank`. They differ only in the innermost part of the `local` axis.
Members sequence_ranks(const Config& config, int rank) {
  const int tensor = config.mesh.tensor, count = config.mesh.sequence;
  Members members;
  members.index = rank / tensor % count;
  for (int i = 0; i < count; ++i) members.ranks.push_back(rank + (i - members.index) * tensor);
  return members;
}

std::set<int> params_of(const std::vector<exec::UnitState>& units) {
  std::set<int> params;
  for (const exec::UnitState& unit : units) {
    for (const exec::Flat& flat : unit.flats) {
      for (const exec::Slot& slot : flat.slots) params.insert(slot.index);
    }
  }
  return params;
}

// Returns, by the label of its exchanges, the unit of each module that tensor ranks cut.
std::map<const std::string*, int> units_of_labels(const engine::ModelRanks& ranks,
                                                  const std::vector<exec::UnitState>& units) {
  std::map<const std::string*, int> found;
  if (!ranks.tensor) return found;
  std::map<int, int> unit_of;  // by parameter
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (const exec::Flat& flat : units[unit].flats) {
      for (const exec::Slot& slot : flat.slots) unit_of[slot.index] = static_cast<int>(unit);
    }
  }
  for (const auto& [label, params] : ranks.tensor->labels()) {
    for (const int param : params) {
      if (const auto unit = unit_of.find(param); unit != unit_of.end()) {
        found.emplace(label.text.get(), unit->second);
      }
    }
  }
  return found;
}

// Connects this rank with the ranks that compute the model together with it.
void connect(engine::ModelRanks& ranks, const Config& config, const std::shared_ptr<Group>& group,
             const device::Device& computes, const exec::Executor& executor,
             const engine::Blueprint& blueprint) {
  const auto peers = [group, &computes](const Members& members, const char* lane) {
    return std::make_shared<parallel::Peers>(group, members, lane, computes);
  };
  const Groups groups(executor.mesh(), group->rank());
  if (config.mesh.tensor > 1) {
    ranks.tensor.emplace(peers(groups.tensor(), "act"), blueprint.ruled, blueprint.split.tree,
                         params_of(executor.units()));
  }
  if (const Members members = sequence_ranks(config, group->rank()); members.size() > 1)
    ranks.sequence.emplace(members, peers);
  if (config.mesh.pipeline > 1) {
    ranks.stages.emplace(group, groups.pipeline(), blueprint.stages, computes);
    ranks.window.emplace(groups.pipeline(), blueprint.stages, blueprint.specs, config.parallel);
  }
}

void set_budgets(mem::Tiers& tiers, engine::Budgets budgets) {
  tiers.device.set_budget(std::move(budgets.device));
  tiers.host.set_budget(std::move(budgets.host));
  tiers.memory.set_budget(std::move(budgets.memory));
}

void name_units(const engine::Blueprint& blueprint, std::vector<std::string>* modules,
                std::vector<std::string>* names) {
  for (const engine::UnitSpec& spec : blueprint.specs) modules->push_back(spec.module);
  for (const exec::UnitState& unit : blueprint.units) names->push_back(unit.name);
}

std::vector<bool> kept_units(const ModelDesc& model) {
  std::vector<bool> kept;
  for (const UnitDesc& unit : model.units) kept.push_back(unit.kept);
  return kept;
}

// Returns whether a unit stays whole and no context lets users write to it.
std::function<bool(int)> stays_whole(const ModelDesc& model, const engine::Driver& driver) {
  return [&](int unit) { return model.units[unit].kept && driver.held(unit) == 0; };
}

}  // namespace

Core::State::State(const ModelTree& tree, const Config& settings, std::shared_ptr<Group> ranks,
                   bool external_optimizer, std::shared_ptr<Group> nodes)
    : config(settings),
      group(std::move(ranks)),
      tiers(checked_device(tree), settings.monitor.events),
      loss_scale(settings.loss_scale, trains_in_fp16(settings, tree)) {
  const bool local = trains_locally(config) && nodes != nullptr;
  config.resolve(group->size() * (local ? nodes->size() : 1));
  check_memory(tree);
  engine::Blueprint blueprint = engine::draw(tree, config, group->rank());
  check_optimizer(config, external_optimizer);
  engine::foresee(blueprint);
  name_units(blueprint, &unit_modules, &unit_names);
  const Room room = agree(config, {group.get(), nodes.get()}, tree, blueprint.print);
  if (local && nodes->rank() > 0) be_silent(&blueprint.config);
  engine::check_stages(tree, config, room, external_optimizer);
  choice = engine::choose_tiers(blueprint, room, external_optimizer);
  if (group->rank() == 0 && (!local || nodes->rank() == 0)) std::fputs(choice.c_str(), stderr);
  set_budgets(tiers, engine::budgets_of(blueprint, room, external_optimizer));
  const Table table = engine::settle(blueprint);
  engine::check_outer(blueprint.config, nodes.get(), loss_scale.needs_scaling());
  check_outer_steps(blueprint.config, table, external_optimizer);
  config = std::move(blueprint.config);
  model = std::move(blueprint.model);
  resolve_reduce_dtype(model, static_cast<bool>(group->device_groups()), &config);
  executor.emplace(table, blueprint.mesh, *group, tiers, std::move(blueprint.units));
  activation_memory.emplace(model.units.size(), tiers, config);
  driver.emplace(*executor, *activation_memory, kept_units(model));
  wholes.emplace(*executor);
  connect(model_ranks, config, group, tiers.computes, *executor, blueprint);
  moves_params = executor->table().moves_params();
  tiled.emplace(*this, std::move(blueprint.split.tiled), unit_names);
  unit_events = moves_params || table.moves_activations() || moves_caches(table);
  if (!tiers.computes.is_host()) stream = tiers.computes.current();
  if (local) outer.emplace(std::move(nodes), config.comm, *executor, tiers, group->rank());
  engine::Adoption adoption(*executor, tiers, group->rank(), outer ? outer->broadcasts() : nullptr);
  adoption.claim(blueprint.split.tree, config, model, external_optimizer);
  if (outer) outer->claim();
  adoption.take(blueprint.split.tree, config, tiled->all());
  tiled->let_wholes_go();
  order.emplace(
      model, engine::OrderLearner::Scope{unit_events, moves_params, model_ranks.stages.has_value(),
                                         [this](int unit) { return tiled->is_tile(unit); }});
  if (model_ranks.tensor || model_ranks.sequence) {
    exchanges.emplace(model.units.size(), units_of_labels(model_ranks, executor->units()),
                      model_ranks.stages.has_value());
    model_ranks.watch([this](const LayerExchange& made, const comm::Label& label) {
      Planning{*this}.add_exchange(made, label);
    });
  }
  // Each stage of this rank runs one backward per micro-batch.
  window.emplace(config.batch.accumulate * config.parallel.virtual_stages,
                 loss_scale.needs_scaling(), unit_events, config.parallel.virtual_stages);
  progress.assign(executor->units().size(), {});
  Planning{*this}.make();
  border.emplace(*executor, *tiled, stays_whole(model, *driver));
  adoption.commit();
  Observer{*this}.begin();
  show(group->board(), "the caller's code, after initialize");
}

Core::State::~State() {
  try {
    close(false, "");
  } catch (const std::exception&) {
    // A destructor cannot report an error. close() reports it.
  }
  model_ranks.close();  // graphs may outlive this object
}

void Core::State::install_hooks() {
  const std::weak_ptr<State> weak = weak_from_this();
  for (size_t u = 0; u < executor->units().size(); ++u) {
    const std::vector<exec::Flat>& flats = executor->units()[u].flats;
    for (size_t f = 0; f < flats.size(); ++f) {
      if (!flats[f].trainable || tiled->is_tile(static_cast<int>(u)))
        continue;  // the tiled operators pass these gradients on
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

}  // namespace penstock
