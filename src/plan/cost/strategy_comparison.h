#pragma once
// Compares every strategy and every tier for a described model, for `penstock plan`. A pure
// function.
#include <cstdint>

#include "penstock/plan.h"
#include "src/plan/model_desc.h"

namespace penstock {

// `asked` has a resolved config. Its offload tiers are ignored, since all tiers are tried.
// `asked.room` is the room of each rank. `num_params` is printed in the heading, because the units'
// sizes include padding. If strategies have equal placements on this mesh, only one is tried.
PlanReport compare(const PlanQuestion& asked, const ModelDesc& model, int64_t num_params);

}  // namespace penstock
