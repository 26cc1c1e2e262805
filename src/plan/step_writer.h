#pragma once
// StepWriter: the common base of the planners. It writes one rank's steps and knows only
// placements.
#include <vector>

#include "src/plan/copies.h"
#include "src/plan/plan.h"
#include "src/plan/table.h"

namespace penstock {

class StepWriter {
 public:
  // `model` must outlive the writer.
  StepWriter(const Table& table, const ModelDesc& model, const Mesh& mesh);

 protected:
  int num_units() const { return static_cast<int>(model_.units.size()); }
  const Placement& cell(Role role, Phase phase) const { return table_.at(role, phase); }
  bool trains(int unit) const;

  void put(Step step) { plan_.steps.push_back(std::move(step)); }
  void move(int unit, Role role, const Placement& from, const Placement& to, Chunk chunk = {});
  void move_grad(int unit, Phase from, Phase to, Chunk chunk = {});
  // Moves a unit's parameters to the cell of this phase. A return to rest is free, because the
  // authority stayed there.
  void settle_param(int unit, Phase phase);
  // Starts the book of copies of each unit, with the parameters in the cell of this phase.
  void begin_params(Phase phase);
  // Writes a forward that visits units in this order. Afterwards the parameters of the visited
  // units are in the cell of `after`. `trains`: a backward follows.
  void forward(const std::vector<Visit>& order, bool trains, Phase after);
  // Writes a backward. `last`: by unit, true if no later backward of the step visits it.
  void backward(const std::vector<Visit>& order, const std::vector<bool>& last);
  // Writes the sums along the model axes, the norm and the update of every unit. It runs once per
  // step, when the gradients of all backwards and all stages exist.
  void update();

  const Table table_;
  const ModelDesc& model_;
  const Mesh mesh_;
  Plan plan_;
  int micro_ = kNoMicro;  // micro-batch of computations and of activation moves

 private:
  // Moves the keys and values of the tokens that a block has cached. Writes nothing if they stay
  // where it computes.
  void move_cache(int unit, const Placement& from, const Placement& to);
  // Moves the inputs from which a recomputed unit's backward starts.
  void move_inputs(int unit, Phase from, Phase to);
  // Writes the moves of a gradient after a backward. A gradient that is held in place is
  // accumulated before it moves. Any other gradient moves first, and accumulates where it arrives.
  void settle_grad(int unit, bool last);
  // Writes the sums of gradients whose addends are on the ranks along a model axis. These sums work
  // in place. Writes nothing if the unit has no such gradients.
  void sum_addends(int unit);
  // Writes what the unit's layers exchange in one pass.
  void exchange(int unit, const std::vector<LayerExchange>& exchanges);
  void update_chunk(int unit, const Chunk& chunk);

  const std::vector<Move> publish_;
  std::vector<Copies> params_;
};

}  // namespace penstock
