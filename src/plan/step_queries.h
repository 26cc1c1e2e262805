#pragma once
// Properties of a plan line, for several plan passes. Pure functions.
#include <algorithm>
#include <cstdint>

#include "src/plan/model_desc.h"
#include "src/plan/plan.h"

namespace penstock {

inline bool shares_unit(const Step& a, const Step& b) {
  return std::any_of(a.units.begin(), a.units.end(), [&](int unit) {
    return std::find(b.units.begin(), b.units.end(), unit) != b.units.end();
  });
}

inline bool is_move(const Step& step, Role role) {
  return step.op == Op::kMove && step.role == role;
}

// Returns whether layers make this exchange while they compute. The executor does not run it.
inline bool is_layer_exchange(const Step& step) {
  return is_move(step, Role::kAct) && step.moves.front().kind != MoveKind::kCopy;
}

// Returns whether the step sends or receives between pipeline stages.
inline bool is_transfer(const Step& step) {
  return step.op == Op::kSend || step.op == Op::kReceive;
}

// Returns whether the parameter move `move` must stay below the step `above`. Moves of activations
// and caches and transfers do not touch parameters.
inline bool in_order(const Step& above, const Step& move) {
  return shares_unit(above, move) && !is_move(above, Role::kAct) && !is_move(above, Role::kCache) &&
         !is_transfer(above);
}

// Returns whether the step moves parameters to where they are used. Other parameter moves (to
// `hold`) come after the use.
inline bool is_gather(const Step& step) {
  return is_move(step, Role::kParam) &&
         std::any_of(step.moves.begin(), step.moves.end(), [](const Move& move) {
           return move.kind == MoveKind::kAllGather ||
                  (move.kind == MoveKind::kCopy && move.to == Tier::kDevice);
         });
}

// Returns whether gathers, joined collectives and activation moves may not be moved past this step.
inline bool is_wall(const Step& step) {
  return step.op == Op::kMicro || step.op == Op::kNorm || step.op == Op::kUpdate ||
         step.op == Op::kPublish;
}

inline int64_t unit_bytes(const UnitDesc& unit) {
  int64_t bytes = 0;
  for (const FlatDesc& flat : unit.flats) bytes += flat.numel * dtype_bytes(flat.dtype);
  return bytes;
}

inline int64_t param_bytes(const Step& step, const ModelDesc& model) {
  int64_t bytes = 0;
  for (const int unit : step.units) bytes += unit_bytes(model.units[unit]);
  return bytes;
}

}  // namespace penstock
