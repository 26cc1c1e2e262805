// plan_report: the comparison of src/plan/comparison.h for a model that is at hand.
#include "penstock/core.h"
#include "penstock/plan.h"
#include "src/engine/blueprint.h"
#include "src/engine/room.h"
#include "src/plan/comparison.h"

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

}  // namespace penstock
