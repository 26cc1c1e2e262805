#pragma once
// Which mesh to use: every tensor x pipeline x data mesh of a cluster in closed form, one rank a
// stage, best first. Pure. docs/parallel.md says what is counted.
#include <vector>

#include "penstock/mesh_plan.h"
#include "src/plan/model_desc.h"

namespace penstock {

// What rank `rank` of the pipeline and a tensor rank have of a model of blocks: stages are runs of
// about equally many, the root is on the first and the last.
ModelDesc stage_of(const ModelDesc& model, int tensor, int pipeline, int rank, int data);

// `model` as drawn for as many data ranks as the cluster has ranks.
std::vector<MeshAlternative> mesh_alternatives(const MeshQuestion& question,
                                               const ModelDesc& model);

std::string mesh_text(const MeshQuestion& question, const std::vector<MeshAlternative>& all);

}  // namespace penstock
