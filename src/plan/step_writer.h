#pragma once
// StepWriter: what the planner's parts share. It writes one rank's steps; knows placements only.
#include <vector>

#include "src/plan/copies.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

class StepWriter {
 public:
  // `model` outlives it.
  StepWriter(const Table& table, const ModelDesc& model, const Mesh& mesh);

 protected:
  int num_units() const { return static_cast<int>(model_.units.size()); }
  const Placement& cell(Role role, Phase phase) const { return table_.at(role, phase); }
  bool trains(int unit) const;

  void put(Step step) { plan_.steps.push_back(std::move(step)); }
  void move(int unit, Role role, const Placement& from, const Placement& to, Chunk chunk = {});
  void move_grad(int unit, Phase from, Phase to, Chunk chunk = {});
  // Makes a unit's cell true. Going back to rest is free: the authority never left.
  void settle_param(int unit, Phase phase);
  // The books of all units where parameters are found in this phase.
  void begin_params(Phase phase);
  // The sum over tensor ranks that a split unit's output (forward) or input gradient needs.
  void sum_activations(int unit, TensorSplit split);
  // The inputs that a recomputed unit's backward starts from.
  void move_inputs(int unit, Phase from, Phase to);
  // A gradient held in place is added up before it moves; any other moves first and is added up
  // where it arrives.
  void settle_grad(int unit, bool last);
  // Of what the tensor ranks have addends of, where its gradient is.
  void sum_partial(int unit);
  // Of what several stages of a pipeline have.
  void sum_stages(int unit);
  // In place.
  void sum_grad(int unit, Axis axis);
  // The norm, and every unit's update.
  void update();

  const Table table_;
  const ModelDesc& model_;
  const Mesh mesh_;
  Plan plan_;
  int micro_ = kNoMicro;  // that computations and moves of activations are of

 private:
  void update_chunk(int unit, const Chunk& chunk);

  const std::vector<Move> publish_;
  std::vector<Copies> params_;
};

}  // namespace penstock
