#pragma once
// Updates: the global norm, the optimizer, and the publish of updated parameters.
//
// Called only by the model's thread. If the `update` cell is on the device, the optimizer runs on
// the model's thread. Otherwise it runs on the update lane, and step() may return before the update
// ends. Until the unit's fence (UnitState::updated) is reached, only the update lane may use the
// update's buffers.
#include <ATen/core/Tensor.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/config.h"
#include "penstock/error.h"
#include "src/exec/gradients.h"
#include "src/exec/norm.h"
#include "src/optim/optimizer_step.h"

namespace penstock::exec {

// Thrown on all ranks if gradients are not finite. The weights are unchanged.
class NonFinite : public RuntimeFault {
 public:
  using RuntimeFault::RuntimeFault;
};

// The slice of one parameter that this rank updates, for a user's optimizer.
struct ShardView {
  std::string name;
  at::Tensor param;   // the model's parameter
  at::Tensor master;  // fp32, one dimension, may be empty
  int64_t begin = 0;  // index of the first element of `master` in the parameter
};

class Updates {
 public:
  Updates(Rank& rank, Lanes& lanes, Gradients& gradients);

  void begin(Update update);
  // Blocks until every unit has its new weights, which on a device may still be queued. `for_host`:
  // also until the host may read and write the state in its memory, to which a device that updates
  // it sends it back.
  void finish(bool for_host = true);
  // Blocks until all resting parameters are in place. Then takes the fingerprints (Flat::left) that
  // later show user edits.
  void arrive();
  void discard();  // drops optimizer state that was read ahead for an update that will not run
  const Seen& seen() const { return seen_; }  // results of the last norm
  int64_t exchanges() const { return channel_.exchanges(); }
  void set_step(int64_t step);

  void norm(const comm::Label& label);
  void move(const PlannedStep& planned);  // moves optimizer state, or reads gradients from disk
  void update(const PlannedStep& planned);
  void publish(const PlannedStep& planned);
  // Returns the range of the flat's elements that this rank updates.
  std::pair<int64_t, int64_t> owned(const Flat& flat) const;
  // Returns the chunk's fp32 masters in memory. If they rest on disk, reads them first.
  device::Address fetch_master(Flat& flat, ChunkState& chunk);
  std::vector<ShardView> shard_views();
  std::vector<at::Tensor> shard_gradients();  // fp32, aligned with shard_views()

 private:
  // The new parameters, which the optimizer's pass writes.
  struct Published {
    device::Address rest, written;
    mem::Lease room;  // memory of `written` if it is not `rest`
    int64_t bytes = 0;
  };
  // The runs of one flat, and what they publish.
  struct FlatUpdate {
    std::vector<optim::StepRun> runs;
    std::vector<Published> published;  // by run
  };
  Published publish_from(device::Address rest, const optim::Range& range, device::Address master);
  void on_lane(const std::vector<int>& units, std::function<void()> work);
  void move_state(Flat& flat, ChunkState& chunk, const PlannedStep& planned);
  void bump_versions();
  void prepare_external();
  void update_unit(int unit, const Chunk& chunk, bool writes_back);
  void tell_changes(const Flat& flat, const ChunkState& chunk);
  void update_flat(Flat& flat, const Chunk& chunk, bool writes_back);
  void add_run(FlatUpdate& update, Flat& flat, ChunkState& chunk, std::pair<int64_t, int64_t> part,
               const Slot& slot, bool writes_back);
  void run(const FlatUpdate& update);
  void publish_to_disk(int unit, const Chunk& chunk);
  device::Address rest_at(Flat& flat, int64_t element) const;
  // Copies user edits of the parameters in this range to their masters.
  void take_edits(Flat& flat, device::Address master, int64_t element, int64_t numel) const;
  device::Address master_of(Flat& flat, ChunkState& chunk);  // address of its first element
  template <class View>
  void for_each_piece(const View& view);

  Rank& rank_;
  Lanes& lanes_;
  Gradients& gradients_;
  Norm norm_;
  std::set<const Slot*> compared_;  // slots that were compared with their replicas on tensor ranks
  comm::Channel channel_;
  Update update_;
  Seen seen_;
  float grad_scale_ = 1.0F;
  optim::StepScalars scalars_;
};

}  // namespace penstock::exec
