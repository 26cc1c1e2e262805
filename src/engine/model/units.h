#pragma once
// Finds the units of a model and the unit of each parameter. Pure.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/plan/model_desc.h"

namespace penstock::engine {

struct UnitSpec {
  std::string module;  // module name; "" for the root, which is always unit 0
  std::string type;
  std::vector<int> params;  // indices into ModelTree::params, in model order
  bool block = true;        // see UnitDesc
};

// Returns the units. Blocks are the outermost modules of the classes in `config.modules`. Without
// that list, blocks are repeated modules: two or more children of one class under one parent, if
// the children have children themselves. Without repeated modules, blocks are the largest modules
// of at most `config.max_bytes`. Outside of the blocks, each layer with at least
// `config.layer_bytes` of its own parameters (an embedding, a head) is a unit. Each tile is a unit.
// A parameter that several units use belongs to the root. Throws ConfigError if the model has no
// parameters, or if a class is not found (the error suggests the nearest name).
std::vector<UnitSpec> find_units(const ModelTree& tree, const UnitsConfig& config);

// Writes the order that is assumed before step one: modules in model order, each tile after the
// module that uses it.
void assume_order(ModelDesc& model, const ModelTree& tree, const std::vector<UnitSpec>& specs);

}  // namespace penstock::engine
