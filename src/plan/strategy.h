#pragma once
// From a Config to the values the planner works with. Pure.
#include <array>
#include <optional>
#include <string>

#include "penstock/config.h"
#include "src/plan/cost/simulator.h"
#include "src/plan/planner.h"
#include "src/plan/table.h"

namespace penstock {

inline constexpr std::array<Section, 7> kSections = {
    Section::kForward,      Section::kForwardNext, Section::kEval,       Section::kBackward,
    Section::kBackwardLast, Section::kUpdate,      Section::kUpdateEarly};

// "forward" "forward_next" "eval" "backward" "backward_last" "update" "update_early". Throws
// ConfigError.
Section section_named(const std::string& name);

// After resolve(). As state sees it: ranks that have parts of one sequence are data ranks,
// neighbours in `local`.
Mesh mesh_of(const Config& config);
// Which units are computed again in backward. Throws ConfigError when there is no unit that can be.
void mark_recomputed(const Config& config, ModelDesc& model);

// In how many chunks each unit's optimizer state passes through memory. `table` as on the mesh.
void set_chunks(const Config& config, const Table& table, ModelDesc& model);
// "auto" becomes what sends less between nodes. `rings`: the ranks have a back end of a device,
// whose sums go around rings.
void resolve_reduce_dtype(const ModelDesc& model, bool rings, Config* config);
// The passes that the config asks for.
Plan with_passes(const Plan& plan, const ModelDesc& model, const Config& config);

// The strategy's preset with the config's own cells, at the precision of the narrowest parameters
// that train (the others keep their dtype, see Table::dtype_in).
Table table_of(const Config& config, const ModelDesc& model);
// Whether the strategy's resting parameters are sharded, so that they can be elsewhere.
bool can_rest_away(const std::string& strategy);
// The same settings for another strategy and another tier of the optimizer, without those that mean
// nothing there.
Config adapted(Config config, const std::string& strategy, const std::string& optimizer);
int num_moments(const Config& config);  // per parameter, beside the master

// What one training step of this strategy takes.
Ledger predict(const Config& config, ModelDesc model);
// The same, planning no more than three micro-batches of a window: those between are alike.
Ledger predict_window(const Config& config, ModelDesc model);

}  // namespace penstock
