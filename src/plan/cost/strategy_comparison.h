#pragma once
// The comparison behind `penstock plan`: every strategy and tier for a described model. Pure.
#include <cstdint>

#include "penstock/plan.h"
#include "src/plan/model_desc.h"

namespace penstock {

// `asked`: its config is resolved and its offload tiers are ignored, since all are tried; its room
// is what each rank has. `num_params` is for the heading: units are padded, the model is not.
// Strategies that place everything alike on this mesh are tried once.
PlanReport compare(const PlanQuestion& asked, const ModelDesc& model, int64_t num_params);

}  // namespace penstock
