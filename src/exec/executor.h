#pragma once
// Executor: runs plan steps. Every movement of training state goes through run(), and there is one
// call site for each kind of move. It knows placements, not strategies.
//
// Compute thread only (autograd's thread while a backward runs); it hands moves to two ordered
// lanes, gather and reduce, and waits for their events. Updates on the host have a lane of their
// own: what a unit's update reads and writes is that lane's until the unit's event, so step() may
// return before and the optimizer works while the device does.
#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/config.h"
#include "penstock/error.h"
#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/exec/activations.h"
#include "src/exec/flat.h"
#include "src/exec/lane.h"
#include "src/mem/arena.h"
#include "src/plan/plan.h"

namespace penstock::exec {

// A step with its text and its units' modules (the label of its collectives) and, for an update,
// whether the plan's publish asks for the low-precision parameter (one kernel pass writes it).
struct PlannedStep {
  Step step;
  std::string text;
  bool write_back = false;
};
std::vector<PlannedStep> prepare(const Plan& plan, const std::vector<UnitState>& units);

// Thrown on all ranks alike when gradients are not finite; the weights are unchanged.
class NonFinite : public RuntimeFault {
 public:
  using RuntimeFault::RuntimeFault;
};

// A piece of a parameter that this rank updates, as the user's own optimizer sees it.
struct ShardView {
  std::string name;
  at::Tensor param;   // the model's parameter it is a piece of
  at::Tensor master;  // fp32, one dimension, may be empty
};

class Executor {
 public:
  // `units` have their resting parameters (adopt_parameters()) and are attached or freed.
  Executor(const Table& table, const Mesh& mesh, Group& group, mem::Tiers& tiers,
           std::vector<UnitState> units);

  void run(const PlannedStep& planned);

  // The unit's full parameters are there: waits and sets the windows. Throws Bug when no move
  // brought them.
  void require(int unit);
  bool full(int unit) const;  // gathered, or on its way
  // The moves that take the unit's parameters from where they are to where `phase` wants them.
  PlannedStep move_to(int unit, Phase phase) const;
  void drop(int unit);

  // Adds one parameter's gradient to the unit's partial sum. False when it is not finite.
  bool take_gradient(int unit, int flat, int slot, const at::Tensor& gradient);
  // Replaces what was accumulated by `full` (fp32, the same on every rank) times `factor`.
  void set_gradient(int unit, int flat, int slot, const at::Tensor& full, double factor);
  // Throws away what was accumulated.
  void discard_gradients();
  void drain();  // waits for all lanes

  // Set before an update section runs.
  struct Update {
    std::vector<OptimizerConfig> groups;  // by parameter group
    double clip = 0.0;
    double divisor = 1.0;            // micro-batches averaged over, times the loss scale
    std::string bad;                 // first non-finite contribution on this rank, or empty
    std::function<void()> external;  // the user's optimizer; empty = our kernels
  };
  void begin_update(Update update);
  void finish_updates();  // every unit has its new weights
  double grad_norm() const { return grad_norm_; }

  // Collective reads and writes; every rank calls them in the same order.
  at::Tensor full_flat(int unit, int flat, Role role);  // fp32, numel elements
  void refresh(int unit);  // after rank 0's full copy was edited: broadcast, masters, shards
  std::vector<ShardView> shard_views();
  std::vector<at::Tensor> shard_gradients();  // fp32, aligned with shard_views()
  std::vector<std::string> share(const std::string& label, const std::string& payload);
  void broadcast(const std::string& label, void* data, int64_t bytes);

  DiskTraffic& traffic() { return traffic_; }
  Activations& activations() { return activations_; }
  const Activations& activations() const { return activations_; }
  void set_step(int64_t step);
  std::vector<UnitState>& units() { return units_; }
  const std::vector<UnitState>& units() const { return units_; }
  const Table& table() const { return table_; }
  // Resting parameters are not what computes: units are brought and entered.
  bool moves_params() const { return table_.moves_params(); }
  const Mesh& mesh() const { return mesh_; }

 private:
  struct Reduction {  // in flight on the reduce lane
    int unit = 0, flat = 0;
    mem::Lease partial, scratch;
    mem::Lease between;     // fp32, between two collectives
    bool in_place = false;  // the reduced gradient is `partial` itself
  };

  // One flat's way through its collectives, on the reduce lane.
  struct ReduceWork {
    std::string label;
    std::vector<Move> collectives;
    char *partial = nullptr, *scratch = nullptr, *between = nullptr;
    char* result = nullptr;  // null: the partial sum itself
    Dtype dtype = Dtype::kFp32, result_dtype = Dtype::kFp32;
    int64_t numel = 0;
    bool accumulate = false;  // into the result
  };

  comm::Members members(const std::vector<Axis>& axes) const;
  void move_param(const PlannedStep& planned);
  void bring_from(const PlannedStep& planned);
  std::deque<mem::Lease> take_for(const std::vector<int>& units, int num_shards);
  void bring(const PlannedStep& planned);
  void slice(int unit, const std::vector<Move>& moves);
  void move_stored(const PlannedStep& planned);
  void move_stored_of(Flat& flat, Role role, const Move& move, const Chunk& chunk);
  void move_act(const PlannedStep& planned);
  Dtype partial_dtype(const Flat& flat) const;
  void reduce(const PlannedStep& planned);
  void start_reduction(int unit, int flat, const PlannedStep& planned,
                       std::vector<std::function<void()>>& work);
  void take_reduce_buffers(const ReduceWork& job, int64_t numel, Reduction& reduction);
  void run_reduction(const ReduceWork& job);
  void finish_reductions();
  void norm(const std::string& text);
  double own_squares(const Flat& flat) const;
  double own_sum_squares() const;
  void refresh_master(Flat& flat, ChunkState& chunk, const char* owned_part);
  void put_sum_back(Flat& flat);
  void drop_sum(Flat& flat);
  at::Tensor reduced_full(Flat& flat, const std::string& label);
  at::Tensor partial_full(Flat& flat, const std::string& label);
  void gather_whole(const Placement& place, float* full, int64_t numel, const std::string& label);
  void prepare_external();
  void on_update_lane(const std::vector<int>& units, std::function<void()> work);
  void update(int unit, const Chunk& chunk, bool write_back);
  void update_flat(Flat& flat, const Chunk& chunk, bool write_back);
  void update_range(Flat& flat, ChunkState& state, int64_t begin, int64_t end, const Slot& slot,
                    bool write_back);
  void publish(const PlannedStep& planned);
  void publish_to_disk(int unit, const Chunk& chunk);
  // The elements of a flat that this rank updates.
  std::pair<int64_t, int64_t> owned(const Flat& flat) const;
  int64_t reduced_element_bytes(const Flat& flat) const;
  float* master_of(Flat& flat, ChunkState& state);  // of the chunk's first element
  bool shares_master(const Flat& flat) const { return !table_.has_master(flat.dtype); }
  float* fetch_master(Flat& flat, ChunkState& state);  // as master_of, from wherever it rests

  const Table table_;
  const Mesh mesh_;
  Group& group_;
  mem::Tiers& tiers_;
  std::vector<UnitState> units_;
  DiskTraffic traffic_;
  Activations activations_;
  comm::Channel gather_channel_, reduce_channel_, control_channel_;
  std::vector<Reduction> reductions_;
  Event reduced_;
  Update update_;
  double grad_norm_ = 0.0;
  float grad_scale_ = 1.0F;
  // Last, so that the lanes end first.
  Lane gather_lane_, reduce_lane_, update_lane_;
};

}  // namespace penstock::exec
