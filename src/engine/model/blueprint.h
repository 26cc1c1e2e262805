#pragma once
// Blueprint: what a model becomes under a config, drawn before anything of it is moved. The steps
// are pure: ranks that agree on the config, the model and the room draw the same.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/plan.h"
#include "src/engine/mesh/stage_split.h"
#include "src/engine/model/units.h"
#include "src/exec/flat.h"
#include "src/mem/arena.h"
#include "src/parallel/tensor_rules.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"
#include "src/tiles/split.h"

namespace penstock::engine {

// The dtype a parameter computes in: the first matching `dtypes` rule, else `precision`, else its
// own. Throws ConfigError for parameters that are neither float32, bfloat16 nor float16.
Dtype compute_dtype(const Config& config, const ParamInfo& param);

struct Blueprint {
  Config config;  // resolved
  Mesh mesh;
  tiles::Split split;                  // the model with its large weights in tiles
  std::vector<parallel::Ruled> ruled;  // modules that tensor ranks compute together
  std::vector<UnitSpec> specs;         // its units
  std::vector<exec::UnitState> units;  // and their flats with their slots, without memory
  std::string print;                   // what ranks must agree on: fingerprint()
  Stages stages;                       // who computes what, in a pipeline
  ModelDesc model;                     // the planner's view of them
};

// `config` is resolved. Units in model order, in backward in reverse. All ranks draw the same, but
// for their own parts of what tensor ranks cut. Throws ConfigError.
Blueprint draw(const ModelTree& tree, const Config& config, int rank = 0);

// What this model is expected to do in step one: the order that its modules and tiles suggest, and
// which units are computed again in backward. Throws ConfigError.
void foresee(Blueprint& blueprint);

// Where the config leaves tiers open, takes the best that fits `room`, and says what it chose from
// (else ""). Throws ConfigError for what cannot fit, before anything is taken.
std::string choose_tiers(Blueprint& blueprint, const Room& room, bool external_optimizer);

// Whether every stage of a pipeline can have its part so: all ranks look at all of them, so that
// all are told. Throws ConfigError.
void check_stages(const ModelTree& tree, const Config& config, const Room& room,
                  bool external_optimizer);

// Of the tiers that were chosen; where one runs out, its advice says what would fit.
struct Budgets {
  mem::Budget device, host, memory;
};
Budgets budgets_of(const Blueprint& blueprint, const Room& room, bool external_optimizer);

// The table, and in how many chunks each unit's optimizer state passes through memory.
Table settle(Blueprint& blueprint);

// What ranks must agree on: every parameter's name, shape, dtype and unit, one a line.
std::string fingerprint(const std::vector<exec::UnitState>& units);

}  // namespace penstock::engine
