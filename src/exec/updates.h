#pragma once
// Updates: the global norm, the optimizer, and publishing what it made.
//
// The optimizer works where its `update` cell is: on the compute thread, or on a lane of its own,
// and then what a unit's update reads and writes is that lane's until the unit's event, so step()
// may return before and the optimizer works while the device does.
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
#include "src/optim/kernels.h"

namespace penstock::exec {

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
  int64_t begin = 0;  // element of the parameter
};

class Updates {
 public:
  Updates(Rank& rank, Lanes& lanes, Gradients& gradients);

  void begin(Update update);
  void finish();  // every unit has its new weights
  // Every unit is where it rests. On a device the engine remembers how it leaves them to users.
  void arrive();
  void discard();                             // what was read ahead of an update that does not come
  const Seen& seen() const { return seen_; }  // with the last norm
  int64_t exchanges() const { return channel_.exchanges(); }
  void set_step(int64_t step);

  void norm(const comm::Label& label);
  void move(const PlannedStep& planned);  // optimizer state, and gradients that wait on disk
  void update(const PlannedStep& planned);
  void publish(const PlannedStep& planned);
  // The elements of a flat that this rank updates.
  std::pair<int64_t, int64_t> owned(const Flat& flat) const;
  // The chunk's fp32 masters, wherever they rest.
  device::Address fetch_master(Flat& flat, ChunkState& chunk);
  std::vector<ShardView> shard_views();
  std::vector<at::Tensor> shard_gradients();  // fp32, aligned with shard_views()

 private:
  // New parameters on their way from the optimizer's pass.
  struct Published {
    device::Address rest, written;
    mem::Lease room;  // what they are written to, where that is not where they rest
  };
  Published publish_from(device::Address rest, const optim::Range& range, device::Address master);
  void on_lane(const std::vector<int>& units, std::function<void()> work);
  void move_state(Flat& flat, ChunkState& chunk, const PlannedStep& planned);
  void bump_versions();
  void prepare_external();
  void update_unit(int unit, const Chunk& chunk, bool writes_back);
  void tell_changes(const Flat& flat, const ChunkState& chunk);
  void update_flat(Flat& flat, const Chunk& chunk, bool writes_back);
  void update_range(Flat& flat, ChunkState& chunk, std::pair<int64_t, int64_t> range,
                    const Slot& slot, bool writes_back);
  void publish_to_disk(int unit, const Chunk& chunk);
  device::Address rest_at(Flat& flat, int64_t element) const;
  // What users wrote to parameters of this range goes to their masters.
  void take_edits(Flat& flat, device::Address master, int64_t element, int64_t numel) const;
  device::Address master_of(Flat& flat, ChunkState& chunk);  // of the chunk's first element
  bool shares_master(const Flat& flat) const {
    return !rank_.has_master[static_cast<size_t>(flat.dtype)];
  }
  template <class View>
  void for_each_piece(const View& view);

  Rank& rank_;
  Lanes& lanes_;
  Gradients& gradients_;
  Norm norm_;
  std::set<const Slot*> compared_;  // replicas over the tensor axis
  comm::Channel channel_;
  Update update_;
  Seen seen_;
  float grad_scale_ = 1.0F;
};

}  // namespace penstock::exec
