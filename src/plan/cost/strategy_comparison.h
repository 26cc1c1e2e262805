#pragma once
// The comparison behind `penstock plan`: every strategy and every tier for a described model. Pure.
#include <cstdint>

#include "penstock/plan.h"
#include "src/plan/model_desc.h"

namespace penstock {

// `asked` has a resolved config; its offload tiers are ignored, since all are tried. Its room is
// the room of each rank. `num_params` is for the heading: units are padded, the model is not.
// Strategies with equal placements on this mesh are tried once.
PlanReport compare(const PlanQuestion& asked, const ModelDesc& model, int64_t num_params);

}  // namespace penstock
