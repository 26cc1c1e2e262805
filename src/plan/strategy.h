#pragma once
// Pure functions that convert a Config to the values that the planner works with.
#include <array>
#include <functional>
#include <optional>
#include <string>

#include "penstock/config.h"
#include "penstock/export.h"
#include "src/plan/cost/simulator.h"
#include "src/plan/planner.h"
#include "src/plan/table.h"

namespace penstock {

inline constexpr std::array<Section, 7> kSections = {
    Section::kForward,      Section::kForwardNext, Section::kEval,       Section::kBackward,
    Section::kBackwardLast, Section::kUpdate,      Section::kUpdateEarly};

// Returns the section named "forward" "forward_next" "eval" "backward" "backward_last" "update" or
// "update_early". Throws ConfigError.
Section section_named(const std::string& name);

// Returns whether each node trains on its own between outer steps ([Note: Outer steps]).
bool trains_locally(const Config& config);

// Returns the number of elements that an outer step exchanges for `numel` elements of a rank: each
// node's part of them has the same size.
int64_t outer_numel(int64_t numel, int64_t num_nodes);
// Returns the bytes that a rank with `numel` elements sends for them in one outer step.
int64_t outer_bytes(const CommConfig& comm, int64_t numel, int64_t num_nodes);

// Returns the mesh over which a resolved config distributes state: sequence ranks count as data
// ranks and are neighbours in `local`. If nodes train on their own, it is the mesh of one node.
Mesh mesh_of(const Config& config);

// Returns the index of the rank's part of a global batch, in [0, mesh.data). Ranks that compute one
// copy of the model together have the same index. The config must be resolved.
PENSTOCK_API int data_rank(const MeshConfig& mesh, int rank);
// Marks the units that are computed again in backward. Throws ConfigError if no unit can be
// recomputed.
void mark_recomputed(const Config& config, ModelDesc& model);

// Changes the order of the backward: each unit with frozen parameters ends only after the following
// visits that only produce a gradient. No gradient marks the last use of frozen parameters, so
// their unit stays in use until the backward enters another unit.
void end_frozen_last(const Table& table, ModelDesc& model);

// Sets the number of chunks in which each unit's optimizer state passes through memory. `table`
// must be normalized for the mesh.
void set_chunks(const Config& config, const Table& table, ModelDesc& model);
// Marks the units that stay whole between forwards: those that the forward uses first, up to
// offload.keep_bytes.
void set_kept(const Config& config, ModelDesc& model);
// Replaces "auto" in comm.reduce_dtype by the dtype that sends fewer bytes between nodes. `rings`:
// the ranks have a device back end that sums along rings.
void resolve_reduce_dtype(const ModelDesc& model, bool rings, Config* config);
// Applies the plan passes that the config selects.
Plan with_passes(const Plan& plan, const ModelDesc& model, const Config& config);

// Returns the strategy's preset with the config's own cells. Its precision is the narrowest dtype
// among trainable parameters. Parameters of other dtypes keep their dtype (Table::dtype_in).
Table table_of(const Config& config, const ModelDesc& model);
// Returns why comm.codec cannot run with this strategy; empty if it can.
std::string codec_refusal(const Config& config, const ModelDesc& model);
// Throws ConfigError if the config asks for outer steps and another setting excludes them.
void check_outer_steps(const Config& config, const Table& table, bool external_optimizer);
// Returns whether step `step` (from 1) has plain wires (comm.exact_first, comm.exact_every).
bool is_exact_step(const CommConfig& comm, int64_t step);
bool has_exact_steps(const CommConfig& comm);
// Returns whether the strategy's resting parameters are sharded, so that they can be on another
// tier.
bool can_rest_away(const std::string& strategy);
// Returns the config with another strategy and optimizer tier, without the settings that do not
// apply to them.
Config adapted(Config config, const std::string& strategy, const std::string& optimizer);
int num_moments(const Config& config);  // number per parameter, without the master

// Returns the plan of one window as the engine runs it: section after section, each with its plan
// passes. `table` must be normalized for the mesh, and set_chunks() must have been called for
// `model`.
Plan window_plan(const Config& config, const Table& table, const ModelDesc& model);

// Predicts one training step of this strategy. The bytes are peaks over a whole run: over its first
// steps and all later ones. `penstock plan`, initialize(), the advice in errors and the ledger all
// report these bytes.
// `plan_of`: plans the window with a table, instead of window_plan() (pipelines).
using PlanOf = std::function<Plan(const Table& table, const ModelDesc& model)>;
Ledger predict(const Config& config, ModelDesc model, bool external_optimizer = false,
               const PlanOf& plan_of = {});
// Like predict(), but plans at most three micro-batches of a window, since all other micro-batches
// are alike.
Ledger predict_window(const Config& config, ModelDesc model, bool external_optimizer = false);

}  // namespace penstock
