#pragma once
// Choice of a mesh: computes the cost of every tensor x pipeline x data mesh of a cluster, and
// sorts the meshes, the best first. The largest stage is planned and simulated as a model of its
// own, and the schedule of the pipeline is replayed with its times. Pure functions.
// docs/parallel.md lists the costs that are counted.
#include <vector>

#include "src/plan/cost/mesh_plan.h"
#include "src/plan/model_desc.h"

namespace penstock {

// Returns the part of a model that one tensor rank of pipeline rank `rank` has. Each stage has
// about the same number of consecutive blocks. The root is on the first stage and on the last
// stage.
ModelDesc stage_of(const ModelDesc& model, int tensor, int pipeline, int rank, int data);

// `model` must be described for as many data ranks as the cluster has ranks.
std::vector<MeshAlternative> mesh_alternatives(const MeshQuestion& question,
                                               const ModelDesc& model);

std::string mesh_text(const MeshQuestion& question, const std::vector<MeshAlternative>& all);

}  // namespace penstock
