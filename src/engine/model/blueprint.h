#pragma once
// Blueprint: the units, flats, stages and planner's description of a model under a config, made
// before any data moves. The functions are pure. So ranks with the same config, model and room make
// the same blueprint, except for their own parts of cut parameters.
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

// Returns the device on which the model trains: the tree's device, else the parameters' device.
PENSTOCK_API c10::Device device_of(const ModelTree& tree);
// Returns a parameter's compute dtype: the first matching `dtypes` rule, else `precision`, else the
// parameter's own dtype. Throws ConfigError if its own dtype is not float32, bfloat16 or float16.
Dtype compute_dtype(const Config& config, const ParamInfo& param);
// Returns a buffer's dtype under the engine. For a floating-point buffer: the first matching
// `dtypes` rule, else the compute dtype of the parameter that it follows. For any other buffer: its
// own dtype.
at::ScalarType buffer_dtype(const Config& config, const ModelTree& tree, const BufferInfo& buffer);

struct Blueprint {
  Config config;  // resolved
  Mesh mesh;
  tiles::Split split;                  // the model with its large weights in tiles
  std::vector<parallel::Ruled> ruled;  // modules that tensor ranks compute together
  std::vector<UnitSpec> specs;         // the units
  std::vector<exec::UnitState> units;  // flats and slots of the units, without memory
  std::string print;                   // fingerprint(), which ranks must agree on
  Stages stages;                       // the modules of each pipeline stage
  ModelDesc model;                     // the planner's description of the units
};

// Makes the blueprint of `rank`. `config` must be resolved. Units are in model order. Throws
// ConfigError if the config does not fit the model.
Blueprint draw(const ModelTree& tree, const Config& config, int rank = 0);

// Writes the assumptions for step one into the model description: the order of modules and tiles,
// and the units that are recomputed in backward. Throws ConfigError.
void foresee(Blueprint& blueprint);

// If the config leaves tiers open ("auto"), sets them to the best tiers that fit `room` and returns
// a text with the alternatives. Otherwise returns "". Throws ConfigError if nothing fits. Takes no
// memory.
std::string choose_tiers(Blueprint& blueprint, const Room& room, bool external_optimizer);

// Checks that every pipeline stage fits into `room`. Every rank checks all stages, so that all
// ranks throw the same ConfigError.
void check_stages(const ModelTree& tree, const Config& config, const Room& room,
                  bool external_optimizer);

// Memory budgets for the chosen tiers. The error for an exhausted budget suggests settings that
// fit.
struct Budgets {
  mem::Budget device, host, memory;
};
Budgets budgets_of(const Blueprint& blueprint, const Room& room, bool external_optimizer);

// Returns the table. Sets the number of chunks in which each unit's optimizer state passes through
// memory. Throws ConfigError for tied weights whose gradients are held on disk.
Table settle(Blueprint& blueprint);

// Returns the text that ranks must agree on: one line per parameter with name, shape, dtype, unit.
std::string fingerprint(const std::vector<exec::UnitState>& units);

}  // namespace penstock::engine
