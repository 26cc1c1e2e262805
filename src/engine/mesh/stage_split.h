#pragma once
// Stages: the modules that each stage of a pipeline computes. The functions are pure, so every rank
// gets the same result.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/engine/model/units.h"

namespace penstock::engine {

// A module that one stage computes. It is a block, or a layer outside the blocks that meets one of
// two conditions: it keeps buffers, or it is large enough for a unit (tied weights count). All
// other layers are on every stage, and so are parameters that belong directly to a module that
// encloses pieces. A stage computes with them whenever its forward calls them.
struct StageModule {
  std::string module;
  int stage = 0;
  bool operator==(const StageModule&) const = default;
};

struct Stages {
  int count = 1;
  std::vector<StageModule> pieces;  // in model order, which is also the order of stages
  // For each parameter of the tree, the stages that may compute with it, in ascending order.
  std::vector<std::vector<int>> of_param;

  // Returns the config for find_units() in a pipeline: a model without blocks gets one unit per
  // layer.
  static UnitsConfig units(const UnitsConfig& config);
};

// Splits the model into mesh.pipeline x parallel.virtual_stages stages. `parallel.stages` names the
// first module of each stage after the first. Without names, the split balances the number of
// weights by which one token is multiplied, so an Embedding counts as zero. `specs` must come from
// find_units() with Stages::units(). Throws ConfigError in three cases: there are more stages than
// pieces (the error lists the pieces), no piece can begin at a named module (the error suggests the
// nearest name), or the names are out of order.
Stages find_stages(const ModelTree& tree, const std::vector<UnitSpec>& specs, const Config& config);

}  // namespace penstock::engine
