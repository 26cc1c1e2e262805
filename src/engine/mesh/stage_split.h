#pragma once
// Stages: the modules that each stage of a pipeline computes. Pure; every rank gets the same
// result.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/engine/model/units.h"

namespace penstock::engine {

// A module that one stage computes. It is a block, or a layer outside of blocks that keeps buffers
// or is as large as a unit has to be (tied weights count, too). Every stage has the smaller modules
// and the own parameters of modules that enclose pieces; it computes them whenever its forward
// calls them.
struct StageModule {
  std::string module;
  int stage = 0;
  bool operator==(const StageModule&) const = default;
};

struct Stages {
  int count = 1;
  std::vector<StageModule> pieces;  // in model order, and so by stage
  // By parameter of the tree: the stages that may compute with it, in ascending order.
  std::vector<std::vector<int>> of_param;

  // Returns the config for find_units() in a pipeline: a model without blocks gets one unit per
  // layer.
  static UnitsConfig units(const UnitsConfig& config);
};

// Splits the model into mesh.pipeline x parallel.virtual_stages stages. `parallel.stages` names the
// first module of each stage after the first. Without names, the split balances the weights that
// one token is multiplied with, so an Embedding counts nothing. `specs` must come from find_units()
// with Stages::units(). Throws ConfigError if there are more stages than pieces (lists the pieces),
// if no piece begins with a name (with the nearest name), or if names are out of order.
Stages find_stages(const ModelTree& tree, const std::vector<UnitSpec>& specs, const Config& config);

}  // namespace penstock::engine
