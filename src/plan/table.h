#pragma once
// Table: role x phase -> Placement. A strategy is a table.
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "src/place/placement.h"

namespace penstock {

struct Route;

enum class Role : uint8_t { kParam, kGrad, kOptim, kAct, kResidual, kCache };
enum class Phase : uint8_t { kRest, kForward, kHold, kBackward, kUpdate };
inline constexpr int kNumRoles = 6;
inline constexpr int kNumPhases = 5;
const char* role_name(Role role);     // "param" "grad" "optim" "act" "residual" "cache"
const char* phase_name(Phase phase);  // "rest" "forward" "hold" "backward" "update"

// The name of the table row that has the wires. Each other row has the placements of one role.
inline constexpr const char* kWireRow = "wire";

// The wires of a table ([Note: Wires]). `param`: parameters that move to a forward or backward.
// `grad`: gradients that move to their sums. `publish`: updated parameters that move to rest
// ([Note: Deltas]). All other moves have the plain wire.
struct TableWires {
  Wires param{}, grad{}, publish{};

  // Returns the names in the order of a table's text.
  static const std::vector<std::string>& names();  // "param" "grad" "publish"
  // Text such as "int8/128". If it names no rounding, gradients are rounded stochastically, without
  // bias, and parameters to nearest, alike in every transfer. The lossy wires of `publish` are
  // always deltas, so their text omits this. set() throws ConfigError.
  std::string text(const std::string& name) const;
  void set(const std::string& name, const std::string& text);
  TableWires on(const Mesh& mesh) const;  // see Wires::on()
  bool operator==(const TableWires&) const = default;

 private:
  Wires& named(const std::string& name);
};

class Table {
 public:
  TableWires wires{};

  // The roles have these cells. param: rest, forward, hold, backward, and update only if
  // keeps_base(); grad: backward, hold, update; optim: rest, update; act: forward, hold, backward;
  // residual: rest, only if keeps_residual(); cache: rest, only if moves_caches().
  const Placement& at(Role role, Phase phase) const;
  void set(Role role, Phase phase, const Placement& place);
  // Returns whether sums of gradients by a lossy wire keep their rounding errors for the next sum
  // ([Note: Residuals]). The table then has the cell residual.rest.
  bool keeps_residual() const { return keeps_residual_; }
  // Returns whether parameters are published as deltas, except in exact steps ([Note: Deltas]). The
  // table then has the cell param.update.
  bool keeps_base() const { return keeps_base_; }
  // Returns the table with every cell normalized for this mesh (normalize()).
  Table on(const Mesh& mesh) const;
  // Returns the dtype that a flat of dtype `own` has in a param or grad cell: `own` if the cell has
  // the table's precision (an fp32 router in a bf16 model), else the cell's dtype. Only a flat with
  // `quantized` takes a quantized dtype.
  Dtype dtype_in(const Placement& cell, Dtype own, bool quantized = false) const;
  // Returns whether the optimizer keeps a separate fp32 master for a parameter of this dtype. If
  // not, the resting parameter is the master: it is fp32, rests where the optimizer works, and
  // contains the elements that this rank updates.
  bool has_master(Dtype dtype) const;
  // Returns the placement in which masters are updated. An optim cell has the dtype of the moments;
  // masters are fp32.
  Placement master() const;
  // Returns whether the model computes directly with the resting parameters.
  bool rests_whole() const;
  // Returns whether parameters are sometimes not ready for computing, so that units must be
  // fetched.
  bool moves_params() const;
  // Returns whether the inputs of recomputed units are on another tier until backward.
  bool moves_activations() const;
  // Returns whether gradients are held where a backward leaves them: added up locally, without a
  // move.
  bool holds_grad_in_place() const;
  // Returns the cell of a unit's gradient at the end of its backward.
  const Placement& grad_after_backward() const;
  bool uses_disk() const;  // for anything except activations and caches
  // grads_wait_on_disk: gradients are held on disk until their unit is updated.
  // grads_come_in_chunks: in addition, they are read in the same chunks as the optimizer state.
  bool grads_wait_on_disk() const;
  bool grads_come_in_chunks() const;
  // Returns the moves that turn updated masters into resting parameters. If only the buffer
  // changes, there is one move, a cast. If the resting parameters are the masters, there is none.
  std::vector<Move> publish() const;
  // Returns whether updated parameters go to rest in the same chunks as the optimizer state.
  bool publishes_chunks() const;
  // One line per role: "param rest=SS@device:bf16 forward=...", and "wire param=int8/128 grad=..."
  // if a wire is not plain.
  std::string text() const;
  // Parses the form that text() returns. Every cell except param.update and those of `residual`,
  // `cache` and `wire` must be present. Throws ConfigError with the cell.
  static Table parse(const std::string& text);
  bool operator==(const Table&) const = default;

 private:
  std::array<std::array<Placement, kNumPhases>, kNumRoles> cells_{};
  bool keeps_residual_ = false, keeps_base_ = false;

  bool has(Role role, Phase phase) const;
};

// Returns whether the keys and values of cached tokens are on another tier while their unit does
// not compute ([Note: Caches]). Only such a table has the cell cache.rest.
bool moves_caches(const Table& table);
// Returns whether the optimizer itself does the first pass of a publish that takes the route `way`.
bool joins_update(const Table& table, const Route& way);
// Returns whether optimizer state on disk can pass through memory in chunks. It can if one copy
// moves it unchanged and the update also writes the published values.
bool streams_state(const Table& table);
// Returns whether updated parameters can be published as deltas ([Note: Deltas]). They can if the
// cells param.rest and param.forward differ at most in their layout and the publish only gathers.
// `table` must be normalized for the mesh.
bool takes_deltas(const Table& table);
// Returns the cell param.update of a table with deltas.
Placement base_of(const Table& table);

// A sum of gradients by a lossy wire.
struct LossySum {
  Placement addends;  // their placement before the sum
  MoveKind kind{};
  Wire wire{};
  bool direct = false;  // no exchange comes before it except reduce_scatter over other axes
};
// Returns these sums for a gradient on its way to its update. `table` must be normalized for the
// mesh.
std::vector<LossySum> lossy_sums(const Table& table, const Mesh& mesh);
// Returns whether one of these sums has the code `sign`. Then Adam keeps its second moments as they
// are, because all values of a block have the same square.
bool sums_signs(const Table& table, const Mesh& mesh);

// The cells and properties of a table that an executor reads, computed once.
struct Cells {
  explicit Cells(const Table& table);
  bool updates_on_device() const { return optim_update.tier == Tier::kDevice; }
  bool grads_stay_on_device() const {
    return grad_hold.tier == Tier::kDevice && grad_update.tier == Tier::kDevice;
  }
  const Placement param_rest, param_forward, param_hold;
  const std::optional<Placement> base;  // param.update
  const Placement grad_hold, grad_update;
  const Placement optim_rest, optim_update;
  const Placement act_hold;
  const std::optional<Placement> residual, cache;               // rest
  const bool grads_on_disk, grads_in_chunks, publishes_chunks;  // see Table
  const std::array<bool, 3> has_master;                         // by Dtype
};

struct TableOptions {
  Dtype precision = Dtype::kFp32;
  bool accumulate = false;  // true: several backwards per step, whose sums are in fp32
  Tier optim_tier = Tier::kDevice;
  Tier param_tier = Tier::kDevice;
  std::optional<Tier> grad_tier{};  // tier of held gradients; default: where the optimizer works
  Dtype moments = Dtype::kFp32;
  Tier act_tier = Tier::kDevice;
};

// Returns the preset `name`, one of preset_names(). For any other name, throws ConfigError with the
// nearest name.
Table preset(const std::string& name, const TableOptions& options);
const std::vector<std::string>& preset_names();

}  // namespace penstock
