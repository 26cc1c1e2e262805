#pragma once
// Updates: the global norm, the optimizer, and publishing what it made.
//
// The optimizer works where its `update` cell is: on the compute thread, or on a lane of its own,
// and then what a unit's update reads and writes is that lane's until the unit's event, so step()
// may return before and the optimizer works while the device does.
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/config.h"
#include "penstock/error.h"
#include "src/exec/gradients.h"

namespace penstock::exec {

// Thrown on all ranks alike when gradients are not finite; the weights are unchanged.
class NonFinite : public RuntimeFault {
 public:
  using RuntimeFault::RuntimeFault;
};

// What one step is asked for.
struct Update {
  std::vector<OptimizerConfig> groups;  // by parameter group
  double clip = 0.0;
  std::string bad;                 // first non-finite contribution on this rank, or empty
  std::function<void()> external;  // the user's optimizer; empty = our kernels
  // What this rank says of the window: as long everywhere, and told with the norm.
  std::function<std::string()> say;
  // What all of them said, by rank. Returns what the gradients are divided by (micro-batches
  // averaged over, times the loss scale); or 0 when it moved gradients or changed what say() says,
  // so that they have to be told again. What it throws ends the update before anything is written.
  std::function<double(const std::vector<std::string>&)> hear;
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
  void finish();   // every unit has its new weights
  void discard();  // what was read ahead of an update that does not come
  double grad_norm() const { return grad_norm_; }
  int64_t exchanges() const { return channel_.exchanges(); }
  void set_step(int64_t step);

  void norm(const comm::Label& label);
  void move(const PlannedStep& planned);  // optimizer state, and gradients that wait on disk
  void update(const PlannedStep& planned);
  void publish(const PlannedStep& planned);
  // The elements of a flat that this rank updates.
  std::pair<int64_t, int64_t> owned(const Flat& flat) const;
  // The chunk's fp32 masters, wherever they rest.
  float* fetch_master(Flat& flat, ChunkState& chunk);
  std::vector<ShardView> shard_views();
  std::vector<at::Tensor> shard_gradients();  // fp32, aligned with shard_views()

 private:
  void on_lane(const std::vector<int>& units, std::function<void()> work);
  void move_state(Flat& flat, ChunkState& chunk, const PlannedStep& planned);
  std::string exchange_norm(const comm::Label& label, double* total, double* divisor);
  void bump_versions();
  void prepare_external();
  void update_unit(int unit, const Chunk& chunk, bool writes_back);
  void tell_changes(const Flat& flat, const ChunkState& chunk);
  void update_flat(Flat& flat, const Chunk& chunk, bool writes_back);
  void update_range(Flat& flat, ChunkState& chunk, std::pair<int64_t, int64_t> range,
                    const Slot& slot, bool writes_back);
  void publish_to_disk(int unit, const Chunk& chunk);
  char* rest_at(Flat& flat, int64_t element) const;
  // What users wrote to parameters of this range goes to their masters.
  void take_edits(Flat& flat, float* master, int64_t element, int64_t numel) const;
  float* master_of(Flat& flat, ChunkState& chunk);  // of the chunk's first element
  bool gathers_masters(const std::vector<int>& units, const Route& way) const;
  bool shares_master(const Flat& flat) const {
    return !rank_.has_master[static_cast<size_t>(flat.dtype)];
  }
  template <class View>
  void for_each_piece(const View& view);

  Rank& rank_;
  Lanes& lanes_;
  Gradients& gradients_;
  comm::Channel channel_;
  Update update_;
  double grad_norm_ = 0.0;
  float grad_scale_ = 1.0F;
};

}  // namespace penstock::exec
