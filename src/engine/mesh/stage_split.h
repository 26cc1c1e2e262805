#pragma once
// Stages: which stage of a pipeline computes what of a model. Pure; every rank finds the same.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/engine/model/units.h"

namespace penstock::engine {

// A module that one stage computes: a block, or a layer outside of blocks that is large (as a unit
// has to be, but also of tied weights) or keeps buffers. What is smaller is on every stage, as what
// a module that encloses pieces has of its own is: it is computed wherever the model comes by it.
struct StageModule {
  std::string module;
  int stage = 0;
  bool operator==(const StageModule&) const = default;
};

struct Stages {
  int count = 1;
  std::vector<StageModule> pieces;  // in model order, and so by stage
  // By parameter of the tree: the stages that may compute with it, ascending.
  std::vector<std::vector<int>> of_param;

  // How units have to be found: a model without blocks has one for each layer.
  static UnitsConfig units(const UnitsConfig& config);
};

// mesh.pipeline x parallel.virtual_stages of them; `parallel.stages` are the modules with which
// those after the first begin, or there are none: then of equal numbers of weights, of which an
// Embedding computes with few. `specs` were found with Stages::units(). Throws ConfigError: more
// stages than pieces (lists them), a name that no piece begins with (the nearest), names out of
// order.
Stages find_stages(const ModelTree& tree, const std::vector<UnitSpec>& specs, const Config& config);

}  // namespace penstock::engine
