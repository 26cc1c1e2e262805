#pragma once
// Adoption: takes a model's parameters into the executor's copies, where they become windows (see
// [Note: Windows]). What is not committed is undone.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/exec/executor.h"
#include "src/mem/tiers.h"
#include "src/plan/model_desc.h"
#include "src/tiles/weights.h"

namespace penstock::engine {

// Replaces the storage of a parameter by one of its own of dtype `dtype` and these sizes, not
// filled yet.
void own_storage(const at::Tensor& param, Dtype dtype, at::IntArrayRef sizes);
// Where the parameter has other sizes, autograd's node for its gradient is made anew.
void set_window(const at::Tensor& param, c10::Storage storage, at::ScalarType dtype,
                at::IntArrayRef sizes);

// Lives while an engine is set up, by the thread that does it; what it is given outlives it. Unless
// commit() was called its end lets the model go: parameters keep no windows into memory that is
// about to go (reading one raises), and swap files are gone.
class Adoption {
 public:
  Adoption(exec::Executor& executor, mem::Tiers& tiers) : executor_(executor), tiers_(tiers) {}
  ~Adoption();
  Adoption(const Adoption&) = delete;
  Adoption& operator=(const Adoption&) = delete;

  // [all ranks] Finds room for all that rests, before anything is moved: a rank without room ends
  // all of them here. Throws ConfigError, or RuntimeFault that names the rank.
  void claim(const Config& config, const ModelDesc& model, bool external_optimizer);
  // [all ranks] Rank 0's values, of parameters and buffers, become everyone's. `tiled` lose theirs,
  // which are in their tiles.
  void take(const ModelTree& tree, const std::vector<tiles::TiledWeight>& tiled);
  void commit() { committed_ = true; }

 private:
  void claim_here(const Config& config, const ModelDesc& model, bool external_optimizer);
  void check_moments(const Config& config, bool external_optimizer) const;
  at::Tensor take_values(exec::Flat& flat, const std::string& label, const ModelTree& tree);
  void take_buffers(const std::vector<at::Tensor>& buffers);

  exec::Executor& executor_;
  mem::Tiers& tiers_;
  bool committed_ = false;
};

}  // namespace penstock::engine
