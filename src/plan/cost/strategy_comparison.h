#pragma once
// The comparison behind `penstock plan`: every strategy and every tier for a described model. A
// pure function.
#include <cstdint>

#include "penstock/plan.h"
#include "src/plan/model_desc.h"

namespace penstock {

// `asked` has a resolved config. Its offload tiers are ignored, since all tiers are tried.
// `asked.room` is the room of each rank. `num_params` appears in the heading, because the units'
// sizes include padding. Strategies with equal placements on this mesh are tried once.
PlanReport compare(const PlanQuestion& asked, const ModelDesc& model, int64_t num_params);

}  // namespace penstock
