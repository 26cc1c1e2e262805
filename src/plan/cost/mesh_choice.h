#pragma once
// Choice of a mesh: compares every tensor x pipeline x data mesh of a cluster with closed formulas,
// one rank per stage, and returns the best first. Pure. docs/parallel.md lists what is counted.
#include <vector>

#include "src/plan/cost/mesh_plan.h"
#include "src/plan/model_desc.h"

namespace penstock {

// Returns the part of a model that pipeline rank `rank` has, for one tensor rank. Stages are runs
// of about equally many blocks; the root is on the first stage and on the last.
ModelDesc stage_of(const ModelDesc& model, int tensor, int pipeline, int rank, int data);

// `model` must be described for as many data ranks as the cluster has ranks.
std::vector<MeshAlternative> mesh_alternatives(const MeshQuestion& question,
                                               const ModelDesc& model);

std::string mesh_text(const MeshQuestion& question, const std::vector<MeshAlternative>& all);

}  // namespace penstock
