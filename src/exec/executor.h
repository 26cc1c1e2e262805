#pragma once
// Executor: the interpreter of the plan. It reads plan lines (which copies move, and how) and the
// table's cells, and does not depend on strategies. One function per kind of move (walk.h) moves
// data from copy to copy. A move between host memory and disk makes no extra copy in memory.
//
// Used only by the model's thread (by autograd's thread while a backward runs). The executor
// submits work to ordered lanes and waits for their fences.
#include <string>
#include <vector>

#include "src/activations/activations.h"
#include "src/activations/layer_caches.h"
#include "src/exec/gathered_values.h"
#include "src/exec/gradients.h"
#include "src/exec/params.h"
#include "src/exec/rank.h"
#include "src/exec/updates.h"
#include "src/plan/plan.h"

namespace penstock::exec {

class Executor {
 public:
  // `units` have no memory yet: claim() reserves the memory, and GatheredValues::adopt() fills it.
  Executor(const Table& table, const Mesh& mesh, Group& group, mem::Tiers& tiers,
           std::vector<UnitState> units);

  // Reserves the place where each copy rests. Throws RuntimeFault if a disk is too full. Moves no
  // data.
  void claim(const ModelDesc& model, int num_moments);
  std::vector<PlannedStep> prepare(const Plan& plan) const;
  // Executes a plan line. User code does the computing. For a compute line, run() only records that
  // the computing has started.
  void run(const PlannedStep& planned);
  // Waits for all lanes. If `last` is set, also ends their threads: no call that uses a lane may
  // follow.
  void drain(bool last = false);

  Params& params() { return params_; }
  Gradients& gradients() { return gradients_; }
  Updates& updates() { return updates_; }
  GatheredValues& values() { return values_; }
  activations::Activations& activations() { return activations_; }
  activations::LayerCaches& caches() { return caches_; }

  // [all ranks] Returns each rank's payload, in rank order. If `in_stage` is set, only the ranks of
  // this pipeline stage exchange payloads.
  std::vector<std::string> share(const std::string& label, const std::string& payload,
                                 bool in_stage = false);
  // [all ranks] Rank 0 gets every rank's text, by rank. Other ranks get an empty list. The exchange
  // is not counted in exchanges().
  std::vector<std::string> collect(const std::string& label, std::string text);
  // [all ranks] Copies rank 0's bytes to every rank.
  void broadcast(const std::string& label, void* data, int64_t bytes);
  // Begins a training step. The gather and reduce lanes must be idle, because the number of the
  // step is part of every tag. The update lane first finishes the work that is already queued, and
  // then switches to the new step.
  void set_step(int64_t step);
  // Returns the number of exchanges with peers in the last complete step.
  int64_t exchanges() const { return exchanges_; }

  std::vector<UnitState>& units() { return rank_.units; }
  const std::vector<UnitState>& units() const { return rank_.units; }
  const Table& table() const { return rank_.table; }
  const Mesh& mesh() const { return rank_.mesh; }
  mem::DiskTraffic& traffic() { return rank_.traffic; }

 private:
  void move(const PlannedStep& planned);
  void move_act(const PlannedStep& planned);
  void move_cache(const PlannedStep& planned);

  int64_t exchanges_ = 0, exchanges_before_ = 0;
  Rank rank_;
  Params params_;
  Gradients gradients_;
  Updates updates_;
  GatheredValues values_;
  activations::Activations activations_;
  activations::LayerCaches caches_;
  // The last member, so that the lanes end before the state that they use.
  Lanes lanes_;
};

// Returns whether ranks hold different parts of the model: parts of parameters, or stages. The
// result is the same on all ranks.
bool divides_model(const Executor& executor);
// Discards the accumulation window: its gradients, and the optimizer state that was read for its
// update.
void discard(Executor& executor);
// Copies user edits to the masters of all units, as the next update would.
void take_every_edit(Executor& executor);
// [stage] For a table with deltas ([Note: Deltas]): publishes the parameters themselves, not their
// deltas, and includes user edits.
void publish_exactly(Executor& executor, const std::vector<int>& units);

}  // namespace penstock::exec
