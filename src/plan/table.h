#pragma once
// Table: role x phase -> Placement. A strategy is nothing else.
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "src/place/placement.h"

namespace penstock {

enum class Role : uint8_t { kParam, kGrad, kOptim, kAct };
enum class Phase : uint8_t { kRest, kForward, kHold, kBackward, kUpdate };
inline constexpr int kNumRoles = 4;
inline constexpr int kNumPhases = 5;
const char* role_name(Role role);     // "param" "grad" "optim" "act"
const char* phase_name(Phase phase);  // "rest" "forward" "hold" "backward" "update"

class Table {
 public:
  // param: rest, forward, hold, backward; grad: backward, hold, update; optim: rest, update; act:
  // forward, hold, backward.
  const Placement& at(Role role, Phase phase) const;
  void set(Role role, Phase phase, const Placement& place);
  // Every cell as seen on this mesh (normalize()).
  Table on(const Mesh& mesh) const;
  // The dtype that a flat range of dtype `own` has in a param or grad cell: its own wherever the
  // cell says the table's precision (an fp32 router in a bf16 model), else the cell's.
  Dtype dtype_in(const Placement& cell, Dtype own) const;
  // The optimizer keeps an fp32 master beside a parameter of this dtype. Without one the resting
  // parameter is the master: it is fp32, rests where the optimizer works, and holds what this rank
  // updates.
  bool has_master(Dtype dtype) const;
  // Where masters are updated. The dtype of an optim cell is that of the moments; masters are fp32.
  Placement master() const;
  // Resting parameters are what computes: the model's own.
  bool rests_whole() const;
  // Parameters are not at all times what computes: units have to be fetched.
  bool moves_params() const;
  // What a recomputed unit needs again waits elsewhere for its backward.
  bool moves_activations() const;
  // Gradients are held where a backward leaves them: added up locally, without a move.
  bool holds_grad_in_place() const;
  // The cell in which a unit's gradient is when its backward has ended.
  const Placement& grad_after_backward() const;
  bool uses_disk() const;  // for anything but activations
  // The optimizer's state on disk can pass through memory in pieces: it comes and goes as it is,
  // and what is published is written as it is updated.
  bool streams_state() const;
  // Gradients are held on disk until their unit is updated; by themselves, in the chunks in which
  // the optimizer's state comes.
  bool grads_wait_on_disk() const;
  bool grads_come_in_chunks() const;
  // The moves that make updated masters the resting parameters; one that changes nothing but the
  // buffer is a cast. Empty where the resting parameters are the masters.
  std::vector<Move> publish() const;
  // Updated parameters go to rest in the same pieces as the optimizer's state passes through
  // memory.
  bool publishes_chunks() const;
  std::string text() const;  // one line a role: "param rest=SS@device:bf16 forward=..."
  // Of such a text, every cell of which is there. Throws ConfigError that names the cell.
  static Table parse(const std::string& text);
  bool operator==(const Table&) const = default;

 private:
  std::array<std::array<Placement, kNumPhases>, kNumRoles> cells_{};
};

struct TableOptions {
  Dtype precision = Dtype::kFp32;
  bool accumulate = false;  // more than one backward per step: sums over time are kept in fp32
  Tier optim_tier = Tier::kDevice;
  Tier param_tier = Tier::kDevice;
  std::optional<Tier> grad_tier{};  // where they are held, if not where the optimizer works
  Dtype moments = Dtype::kFp32;
  Tier act_tier = Tier::kDevice;
};

// One of preset_names(). Throws ConfigError with the nearest name.
Table preset(const std::string& name, const TableOptions& options);
const std::vector<std::string>& preset_names();

}  // namespace penstock
