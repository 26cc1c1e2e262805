#pragma once
// Takes a model's parameters into flat buffers: from then on they are windows (see [Note:
// Windows]).
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/engine/units.h"
#include "src/exec/flat.h"
#include "src/plan/model_desc.h"

namespace penstock::engine {

// The dtype a parameter computes in: the first matching `dtypes` rule, else `precision`, else its
// own. Throws ConfigError for parameters that are neither float32, bfloat16 nor float16.
Dtype compute_dtype(const Config& config, const ParamInfo& param);

// One flat per unit, dtype and trainability, with its slots; nothing is copied yet.
std::vector<exec::UnitState> lay_out(const ModelTree& tree, const std::vector<UnitSpec>& specs,
                                     const Config& config, int num_ranks);

// The planner's view of it, in the order assumed before step one.
ModelDesc describe(const std::vector<exec::UnitState>& units);

// What ranks must agree on: every parameter's name, shape, dtype and unit, one a line.
std::string fingerprint(const std::vector<exec::UnitState>& units);

// Replaces the storage of a parameter by one of its own of dtype `dtype`, not filled yet.
void own_storage(const at::Tensor& param, Dtype dtype);

at::ScalarType scalar_type(Dtype dtype);

}  // namespace penstock::engine
