#pragma once
// Pipeline plans: one training step of each rank of a pipeline, in which several micro-batches are
// under way.
#include <vector>

#include "src/plan/pipeline_schedule.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// What a rank of the pipeline has of the model: units that are in none of its stages' visits keep
// their numbers and have no flats.
ModelDesc part(const ModelDesc& model, int num_ranks, int rank);

// By rank of the pipeline. Between two uses in the step a unit's parameters are as in `hold`, so
// that a table says whether they are gathered for each of them or once. Where several ranks have a
// unit, its gradients are added up before the norm, and all of them update it.
//
// Send and receive are written together, the receive at the end of what the peer does by then. So
// every plan is a projection of one order, which no rank can wait against, even where a send waits
// for its receive.
//
// Throws ConfigError: a stage without units or one that comes after a later one, and, with several
// ranks, gradients on disk of what several of them have.
std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule);

}  // namespace penstock
