#pragma once
// Axis: the axes of the mesh of ranks.
#include <cstdint>

namespace penstock {

// In the order in which ranks are numbered: ranks that differ only in the last axis are neighbours,
// and ranks of different stages are farthest apart. A new axis also needs a row in kAxes, a place
// in kShardOrder (src/place/mesh.h) and, unless it is a data axis, one in kModelAxes
// (src/place/model_placement.h). The mesh of a run has sequence ranks as data ranks of the axis
// `local`, and expert ranks as a part of it (mesh_of(), src/plan/strategy.h).
enum class Axis : uint8_t { kPipeline, kNode, kLocal, kExpert, kSequence, kTensor };

}  // namespace penstock
