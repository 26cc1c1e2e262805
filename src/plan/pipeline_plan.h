#pragma once
// Pipeline plans: one training step of each rank of a pipeline, with several micro-batches in
// progress.
#include <vector>

#include "src/plan/pipeline_schedule.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// Returns the part of the model that one pipeline rank has. If none of its stages visits a unit,
// the unit keeps its number and has no flats.
ModelDesc part(const ModelDesc& model, int num_ranks, int rank);

// Returns the model with the placement of its flats over the pipeline axis: the ranks whose stages
// visit a unit hold its flats. If there are several, each has an addend of the gradient.
ModelDesc with_holders(ModelDesc model, int num_ranks);

// Returns one plan per pipeline rank. Between two uses in a step, a unit's parameters are in
// `hold`. So the table decides whether they are gathered once or for each use. If several ranks
// have a unit, its gradients are summed before the norm, and all these ranks update it.
//
// Each send is added together with its receive, which is appended to the peer's plan. So every plan
// is a projection of one common order. No rank can deadlock, even if a send blocks until its
// receive begins.
//
// Throws ConfigError if a stage has no units, if stages are not computed in order, or if a unit
// that several pipeline ranks share keeps its gradients on disk.
std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule);

}  // namespace penstock
