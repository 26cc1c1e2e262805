#pragma once
// check: a table is either exact or refused. What a table may say follows from a few principles,
// which docs/tables.md lists; everything else runs.
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock {

// What else the run asks for, and what of the table does not go with it.
struct Conditions {
  bool own_optimizer = false;  // the user's, which keeps its state itself
  bool late_update = false;    // step() returns before the optimizer has ended
};

// The dtype of the narrowest parameters that train; the others keep theirs.
Dtype precision_of(const ModelDesc& model);

// Throws ConfigError that names the cell, its value, the principle and what it may be.
void check(const Table& table, const ModelDesc& model, const Mesh& mesh,
           const Conditions& conditions = {});

}  // namespace penstock
