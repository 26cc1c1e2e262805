#pragma once
// Pipeline plans: one training step of each rank of a pipeline, with several micro-batches in
// progress.
#include <vector>

#include "src/plan/pipeline_schedule.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// Returns the part of the model that one pipeline rank has. Units that none of its stages visit
// keep their numbers and have no flats.
ModelDesc part(const ModelDesc& model, int num_ranks, int rank);

// Returns one plan per pipeline rank. Between two uses in the step a unit's parameters are in
// `hold`, so the table decides whether they are gathered for each use or once. If several ranks
// have a unit, its gradients are summed before the norm, and all these ranks update it.
//
// A send and its receive are written at the same time; the receive goes at the end of the peer's
// plan so far. Every plan is therefore a projection of one common order, and no rank can deadlock,
// even if a send blocks until its receive.
//
// Throws ConfigError for a stage without units, for a stage that runs after a later one, and, with
// several ranks, for gradients on disk of a unit that several ranks have.
// ranks, gradients on disk of what several of them have.
std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule);

}  // namespace penstock
