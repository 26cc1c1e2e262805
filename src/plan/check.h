#pragma once
// check(): refuses every table whose results would not be exact. docs/tables.md lists the
// principles. A table is allowed if it violates none of them.
#include "penstock/config.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock {

// Settings outside the table that restrict it.
struct Conditions {
  bool own_optimizer = false;  // the optimizer is the user's and keeps its own state
  bool late_update = false;    // step() returns before the optimizer has finished
  OptimizerType optimizer = OptimizerType::kSgd;
  bool begins_exact = false;  // the first step has plain wires
};

// Returns the narrowest dtype among the trainable parameters. Other parameters keep their own
// dtypes.
Dtype precision_of(const ModelDesc& model);

// Throws ConfigError with the cell, its value, the principle and the allowed values.
void check(const Table& table, const ModelDesc& model, const Mesh& mesh,
           const Conditions& conditions = {});

}  // namespace penstock
