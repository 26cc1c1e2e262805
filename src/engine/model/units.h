#pragma once
// Which modules of a model are units, and which unit each parameter belongs to. Pure.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/plan/model_desc.h"

namespace penstock::engine {

struct UnitSpec {
  std::string module;  // name; "" for the root, which is always unit 0
  std::string type;
  std::vector<int> params;  // indices into ModelTree::params, in model order
  bool block = true;        // see UnitDesc
};

// Outermost modules of the classes in `config.modules`; else repeated blocks (two or more children
// of one class that have children themselves, under one parent); else, without any, the largest
// modules of at most `config.max_bytes`. Beside these, each layer outside of them that has
// `config.layer_bytes` of its own (an embedding, a head), and each tile. A parameter that several
// units use belongs to the root. Throws ConfigError when the model has no parameters or a class is
// not found (nearest name).
std::vector<UnitSpec> find_units(const ModelTree& tree, const UnitsConfig& config);

// The order assumed before step one: modules in model order, each tile wherever it is used.
void assume_order(ModelDesc& model, const ModelTree& tree, const std::vector<UnitSpec>& specs);

}  // namespace penstock::engine
