#pragma once
// Axis: the axes of the mesh of ranks.
#include <cstdint>

namespace penstock {

// In the order in which ranks are numbered: ranks that differ only in the last axis are neighbours,
// and ranks of different stages are farthest apart. A new axis needs one name here and one row in
// kAxes (src/place/mesh.h).
enum class Axis : uint8_t { kPipeline, kNode, kLocal, kExpert, kSequence, kTensor };

}  // namespace penstock
