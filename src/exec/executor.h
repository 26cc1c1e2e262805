#pragma once
// Executor: the interpreter of the plan. It knows a line's text (whose copies move, and how) and
// the table's cells, no strategy. Moves are made by one function per kind (walk.h), from copy to
// copy; what only changes between host memory and disk keeps its bytes where they are.
//
// Compute thread only (autograd's thread while a backward runs); it hands work to ordered lanes and
// waits for their events.
#include <string>
#include <vector>

#include "src/activations/activations.h"
#include "src/exec/gathered_values.h"
#include "src/exec/gradients.h"
#include "src/exec/params.h"
#include "src/exec/rank.h"
#include "src/exec/updates.h"
#include "src/plan/plan.h"

namespace penstock::exec {

class Executor {
 public:
  // `units` have their resting copies (GatheredValues::adopt() fills them).
  Executor(const Table& table, const Mesh& mesh, Group& group, mem::Tiers& tiers,
           std::vector<UnitState> units);

  // Where each copy rests. Throws RuntimeFault when a disk is too full; nothing is moved yet.
  void claim(const ModelDesc& model, int num_moments);
  std::vector<PlannedStep> prepare(const Plan& plan) const;
  // Of compute, which is the user's, it only notes that it was come to.
  void run(const PlannedStep& planned);
  void drain();  // waits for all lanes

  Params& params() { return params_; }
  Gradients& gradients() { return gradients_; }
  Updates& updates() { return updates_; }
  GatheredValues& values() { return values_; }
  activations::Activations& activations() { return activations_; }

  // Throws away the window: gradients, and what was read for an update that does not come.
  void discard();
  // Every rank's, or (`in_stage`) that of every rank of this stage of a pipeline.
  std::vector<std::string> share(const std::string& label, const std::string& payload,
                                 bool in_stage = false);
  // Everyone's text on rank 0, by rank; nothing elsewhere. It counts in no step.
  std::vector<std::string> collect(const std::string& label, std::string text);
  void broadcast(const std::string& label, void* data, int64_t bytes);
  // Begins a step. Between steps, when the lanes are idle: the step is part of every tag.
  void set_step(int64_t step);
  int64_t exchanges() const { return exchanges_; }  // with peers, in the last whole step

  std::vector<UnitState>& units() { return rank_.units; }
  const std::vector<UnitState>& units() const { return rank_.units; }
  const Table& table() const { return rank_.table; }
  const Mesh& mesh() const { return rank_.mesh; }
  mem::DiskTraffic& traffic() { return rank_.traffic; }

 private:
  void move(const PlannedStep& planned);
  void move_act(const PlannedStep& planned);

  int64_t exchanges_ = 0, exchanges_before_ = 0;
  Rank rank_;
  Params params_;
  Gradients gradients_;
  Updates updates_;
  GatheredValues values_;
  activations::Activations activations_;
  // Last, so that the lanes end first.
  Lanes lanes_;
};

}  // namespace penstock::exec
