#pragma once
// Pipeline plans: one training step of each rank of a pipeline, in which several micro-batches are
// under way.
#include <vector>

#include "src/plan/plan.h"
#include "src/plan/schedule.h"
#include "src/plan/table.h"

namespace penstock {

// What a rank of the pipeline has of the model: units of other ranks' stages keep their numbers and
// have no flats.
ModelDesc part(const ModelDesc& model, int num_ranks, int rank);

// By rank of the pipeline. A unit is computed in its stage; between two uses in the step its
// parameters are as in `hold`, so that a table says whether they are gathered for each of them or
// once.
//
// Send and receive are written together, the receive at the end of what the peer does by then. So
// every plan is a projection of one order, which no rank can wait against, even where a send waits
// for its receive.
//
// Throws ConfigError: a stage without units, one that comes after a later one, and units that
// enclose others.
std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule);

}  // namespace penstock
