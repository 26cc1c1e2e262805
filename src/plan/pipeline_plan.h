#pragma once
// Pipeline plans: one training step of each rank of a pipeline, with several micro-batches in
// progress.
#include <vector>

#include "src/plan/pipeline_schedule.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

// Returns the model with only the visits of one stage.
ModelDesc of_stage(const ModelDesc& model, int stage);

// Returns the part of the model that one pipeline rank has. If none of its stages visits a unit,
// the unit keeps its number and has no flats.
ModelDesc part(const ModelDesc& model, int num_ranks, int rank);

// Returns the model with the placement of its flats over the pipeline axis: the ranks whose stages
// visit a unit hold its flats. If several ranks hold a flat, each has an addend of the gradient.
ModelDesc with_holders(ModelDesc model, int num_ranks);

// A pipeline rank's plan of one step.
struct StagePlan {
  std::vector<Plan> actions;  // one per action of the rank, in the order of the schedule
  Plan update;                // after the last action
  Plan joined() const;
};

// Plans the step of one rank. Only the rank's own units and visits are used. An action gathers only
// the units of its stage. Between two uses in a step, a unit's parameters are in the cell `hold`,
// so the table decides whether they are gathered once or for each use. After its last use, a unit
// returns to rest, and its gradient moves to the cell `update`.
//
// Each send is written together with its receive, which belongs to the peer's next action. So every
// plan is a projection of one common order. No rank can deadlock, even if a send blocks until its
// receive begins.
//
// Throws ConfigError if a visit is in none of the schedule's stages.
StagePlan plan_stages(const Table& table, const ModelDesc& part, const Mesh& mesh,
                      const Schedule& schedule, int rank);

// Returns the plans of all pipeline ranks. If several ranks have a unit, its gradients are summed
// before the norm, and all these ranks update it. Throws ConfigError if a stage has no units, if
// stages are not computed in order, or if a unit that several pipeline ranks share keeps its
// gradients on disk.
std::vector<Plan> plan_pipeline(const Table& table, const ModelDesc& model, const Mesh& mesh,
                                const Schedule& schedule);

}  // namespace penstock
