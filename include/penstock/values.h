#pragma once
// Values: parameters and gradients of a core's model, whole or as this rank's shards.
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// A piece of a parameter for an optimizer of the user's own: fp32, one dimension, maybe empty.
struct Shard {
  std::string name;  // of the parameter
  at::Tensor param;
  at::Tensor master;
  int64_t begin = 0;  // element of the parameter that `master` begins with
};

// What Values::weights() makes.
struct WeightsOptions {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool everywhere = true;  // else on rank 0
};

// A view of a core, for the thread that runs the model. Methods marked [all ranks] are collective.
// All but units_of() and release() throw RuntimeFault after close().
class PENSTOCK_API Values {
 public:
  explicit Values(Core& core) : state_(core.state_) {}

  // [all ranks] Full fp32 values by parameter name; `role` is "grad" or "param".
  std::vector<std::pair<std::string, at::Tensor>> full(const std::string& role);
  // [all ranks] full("grad") of one parameter; undefined where no gradient is kept for it.
  at::Tensor gradient(const std::string& param);
  // [all ranks] Full values by parameter name, each in memory of its own, where they are wanted;
  // elsewhere nothing. They go one unit's flat after the other through memory that is counted with
  // the buffers: a rank that does not want them sends its shards, and holds no more. Throws
  // RuntimeFault on every rank where one has no room for that.
  std::vector<std::pair<std::string, at::Tensor>> weights(const WeightsOptions& options = {});
  // [all ranks] The same values in the order in which they come, on rank 0, without the memory for
  // all of them: `take(name, begin, values)` gets fp32 elements of a parameter from `begin` on, row
  // by row, in memory that is gone after the call, and in the end "". What it throws is thrown on
  // every rank.
  using Take = std::function<void(const std::string& name, int64_t begin, const at::Tensor&)>;
  void stream(const Take& take);
  // Of each parameter, whole; without those that are computed in tiles.
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes();
  // Replaces gradients of a complete window, by full fp32 values that are equal on every rank.
  // Throws RuntimeFault in the middle of a window, ConfigError for a name or shape that is wrong.
  void set_gradients(const std::vector<std::pair<std::string, at::Tensor>>& gradients);

  // What is kept for one parameter between steps, in fp32 and its shape: "param" (its master) or a
  // moment by torch's name ("exp_avg"). Throws ConfigError where none is kept. [all ranks]
  at::Tensor state(const std::string& param, const std::string& role);
  // [all ranks] Replaces it, by values that are equal on every rank.
  void set_state(const std::string& param, const std::string& role, const at::Tensor& values);
  // This rank's part of it, a copy: the element it begins with, and the elements, maybe none.
  std::pair<int64_t, at::Tensor> local_state(const std::string& param, const std::string& role);
  // [all ranks] Replaces it on this rank.
  void set_local_state(const std::string& param, const std::string& role, const at::Tensor& values);

  // The units that these parameters are in; every unit when empty.
  std::vector<int> units_of(const std::vector<std::string>& params) const;
  // [all ranks] Parameters of these units are whole until release().
  void gather(const std::vector<int>& units, bool write);
  // `write`: rank 0's values become the weights. Else throws RuntimeFault where they were changed.
  void release(const std::vector<int>& units, bool write);
  // release() after an exception on this rank, and not collective: what was written is lost where
  // parameters do not rest whole.
  void let_go(const std::vector<int>& units);

  // A parameter was `set_()` to itself (torch.nn.utils.parametrize does that), a write that changes
  // nothing: it is not counted as an edit.
  void set_to_itself(const std::string& param);

  // For an optimizer of the user's own.
  std::vector<Shard> shards();
  std::vector<at::Tensor> shard_gradients();

 private:
  struct ParamState;  // param_state.cpp

  std::vector<std::pair<std::string, at::Tensor>> gradients(const std::string& only);
  void refuse_edits(const std::vector<int>& units);
  void let_go_of(const std::vector<int>& units);
  template <class Sink>
  void for_each_weight(bool everywhere, const Sink& sink);

  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
