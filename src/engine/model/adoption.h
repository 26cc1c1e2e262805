#pragma once
// Adoption: moves a model's parameters into the executor's flats and makes each parameter a window
// ([Note: Windows]). If commit() is not called, the adoption is undone.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"
#include "src/exec/executor.h"
#include "src/mem/tiers.h"
#include "src/plan/model_desc.h"
#include "src/tiles/weights.h"

namespace penstock::engine {

// Gives a parameter a new storage without memory, of `dtype` and `sizes`, on `where` (default: the
// parameter's device).
void own_storage(const at::Tensor& param, Dtype dtype, at::IntArrayRef sizes);
void own_storage(const at::Tensor& param, Dtype dtype, at::IntArrayRef sizes, c10::Device where);
// Makes a parameter a contiguous tensor of `sizes` on `storage`. If the parameter's sizes or device
// change, autograd makes a new node for the gradient.
void set_window(const at::Tensor& param, c10::Storage storage, at::ScalarType dtype,
                at::IntArrayRef sizes);

// Used while an engine is set up, by the thread that sets it up. The executor and the tiers must
// outlive this object. If commit() was not called, the destructor releases the model: it removes
// the swap files, and the windows of parameters into memory that will be freed. Reading such a
// parameter then raises an error.
class Adoption {
 public:
  // If nodes train on their own, `between_nodes` broadcasts the first node's values to the first
  // ranks of the other nodes. Only these ranks call it.
  using Broadcast = std::function<void(const std::string& label, void* data, int64_t bytes)>;
  explicit Adoption(exec::Executor& executor, mem::Tiers& tiers, int rank = 0,
                    Broadcast between_nodes = {})
      : executor_(executor), tiers_(tiers), rank_(rank), between_nodes_(std::move(between_nodes)) {}
  ~Adoption();
  Adoption(const Adoption&) = delete;
  Adoption& operator=(const Adoption&) = delete;

  // [all ranks] Reserves room for all resting copies before any data moves. If one rank has no
  // room, throws ConfigError or RuntimeFault on all ranks. The text names that rank.
  // Frozen parameters that rest on disk and are in users' files with the same dtype stay there.
  void claim(const ModelTree& tree, const Config& config, const ModelDesc& model,
             bool external_optimizer);
  // [all ranks] Stores rank 0's values of parameters and buffers on every rank, and casts buffers
  // (see buffer_dtype()). The parameters in `tiled` lose their memory, because their tiles have the
  // values.
  void take(const ModelTree& tree, const Config& config,
            const std::vector<tiles::TiledWeight>& tiled);
  void commit() { committed_ = true; }

 private:
  void leave_in_files(const ModelTree& tree);
  void claim_here(const Config& config, const ModelDesc& model, bool external_optimizer);
  void check_moments(const Config& config, bool external_optimizer) const;
  std::string narrow_flats();
  at::Tensor take_values(const exec::Part& part, const std::string& label, const ModelTree& tree,
                         bool narrow);
  at::Tensor cut_values(const exec::Slot& slot, const at::Tensor& initial,
                        const std::string& label);
  void take_buffers(const ModelTree& tree, const Config& config);
  void broadcast(const std::string& label, const at::Tensor& values);

  exec::Executor& executor_;
  mem::Tiers& tiers_;
  const int rank_;
  const Broadcast between_nodes_;
  std::vector<std::pair<at::Tensor, at::Tensor>> cast_;  // buffers and their former tensors
  bool committed_ = false;
};

}  // namespace penstock::engine
