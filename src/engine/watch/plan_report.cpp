// plan_report() and mesh_report() apply strategy_comparison.h and mesh_choice.h (src/plan/cost) to
// a real model.
#include "penstock/core.h"
#include "penstock/plan.h"
#include "src/engine/model/blueprint.h"
#include "src/engine/model/memory_budget.h"
#include "src/plan/cost/mesh_choice.h"
#include "src/plan/cost/mesh_plan.h"
#include "src/plan/cost/strategy_comparison.h"

namespace penstock {

PlanReport plan_report(const ModelTree& tree, const PlanQuestion& question) {
  PlanQuestion asked = question;
  asked.config.resolve(asked.world_size);
  asked.room = engine::room_of(asked.config.memory);
  const engine::Blueprint blueprint = engine::draw(tree, asked.config);
  int64_t num_params = 0;
  for (const ParamInfo& info : tree.params) num_params += info.param.numel();
  return compare(asked, blueprint.model, num_params);
}

MeshReport mesh_report(const ModelTree& tree, const MeshQuestion& question) {
  MeshQuestion asked = question;
  asked.asked.config.mesh = {};
  asked.asked.config.batch = {};
  asked.asked.config.resolve(asked.nodes * asked.per_node);
  asked.asked.room = engine::room_of(asked.asked.config.memory);
  const engine::Blueprint blueprint = engine::draw(tree, asked.asked.config);
  MeshReport report;
  report.alternatives = mesh_alternatives(asked, blueprint.model);
  report.text = mesh_text(asked, report.alternatives);
  return report;
}

}  // namespace penstock
