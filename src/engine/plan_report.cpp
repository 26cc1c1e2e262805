// plan_report: what each strategy and offload choice would cost a model, before anything runs.
#include <algorithm>

#include "penstock/core.h"
#include "penstock/plan.h"
#include "src/base/text.h"
#include "src/engine/adopt.h"
#include "src/engine/choice.h"
#include "src/engine/room.h"
#include "src/engine/strategy.h"
#include "src/engine/tiling.h"
#include "src/engine/units.h"

namespace penstock {

namespace {

// The layouts that matter on this mesh: an axis of one rank has none.
std::vector<Placement> cells_on(const Mesh& mesh, const std::string& strategy) {
  std::vector<Placement> cells;
  const Table table = preset(strategy, {});
  for (int role = 0; role < kNumRoles; ++role) {
    for (int phase = 0; phase < kNumPhases; ++phase) {
      Placement cell = table.at(static_cast<Role>(role), static_cast<Phase>(phase));
      for (const Axis axis : {Axis::kNode, Axis::kLocal}) {
        if (mesh.size(axis) == 1) cell.layout[static_cast<size_t>(axis)] = Layout::kReplicated;
      }
      cells.push_back(cell);
    }
  }
  return cells;
}

// Also in which tiers they may use.
bool equal_on(const Mesh& mesh, const std::string& a, const std::string& b) {
  const auto offloads = [&](const std::string& name) {
    return preset(name, {}).at(Role::kParam, Phase::kRest).sharded();
  };
  return cells_on(mesh, a) == cells_on(mesh, b) && offloads(a) == offloads(b);
}

}  // namespace

const std::vector<std::string>& strategy_names() { return preset_names(); }

PlanReport plan_report(const ModelTree& tree, const PlanQuestion& question) {
  engine::Question each{question, {}, false};
  Config& config = each.asked.config;
  config.resolve(question.world_size);
  each.asked.room = engine::room_of(config.memory);
  config.offload.optimizer = config.offload.params = "auto";
  const ModelTree split = engine::split_large(tree, config).tree;
  const std::vector<engine::UnitSpec> specs = engine::find_units(split, config.units);
  const Mesh mesh = engine::mesh_of(config);
  const ModelDesc model = engine::describe(engine::lay_out(split, specs, config, mesh.data()));
  PlanReport report;
  for (const std::string& name : preset_names()) {
    const auto twin = std::find_if(each.strategies.begin(), each.strategies.end(),
                                   [&](const auto& other) { return equal_on(mesh, name, other); });
    if (twin == each.strategies.end()) {
      each.strategies.push_back(name);
    } else {
      report.same[name] = *twin;
    }
  }
  report.alternatives = engine::alternatives(each, model);
  int64_t numel = 0;
  for (const ParamInfo& info : tree.params) numel += info.param.numel();
  report.text = concat(numel, " parameters in ", model.units.size(), " units, ",
                       question.world_size, " ranks, ", question.tokens,
                       " tokens per rank and step; bytes per rank at the peak, without "
                       "activations; each rank has ",
                       each.asked.room.text(), "\n", engine::choice_text(report.alternatives));
  for (const auto& [name, twin] : report.same) {
    report.text += concat(name, " is ", twin, " on this mesh\n");
  }
  return report;
}

}  // namespace penstock
