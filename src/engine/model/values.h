#pragma once
// Values: parameters and gradients of a core's model, as full tensors or as this rank's shards.
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// This rank's slice of one parameter, for a user's optimizer: fp32, one dimension, possibly empty.
// In the layout "whole" of the optimizer: the parameter with its own shape, or empty.
struct Shard {
  std::string name;  // name of the parameter
  at::Tensor param;
  at::Tensor master;
  int64_t begin = 0;  // index of the first element of `master` in the parameter
};

// Options of Values::weights().
struct WeightsOptions {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool everywhere = true;  // false: the values arrive only on rank 0
};

// A view of a core, for the model's thread. Methods marked [all ranks] are collective. All methods
// except units_of(), release() and set_closed_by() throw RuntimeFault after close().
class PENSTOCK_API Values {
 public:
  explicit Values(Core& core) : state_(core.state_) {}

  // [all ranks] Returns full fp32 values by parameter name. `role` is "grad" or "param".
  std::vector<std::pair<std::string, at::Tensor>> full(const std::string& role);
  // [all ranks] Returns full("grad") of one parameter. Returns an undefined tensor if no gradient
  // is kept for the parameter.
  at::Tensor gradient(const std::string& param);
  // [all ranks] Returns full values by parameter name, each tensor in its own memory. The result is
  // empty on ranks that do not want the values. Units are gathered flat by flat, through memory
  // that is counted with the buffers. A rank that does not want the values only sends its shards.
  // Throws RuntimeFault on every rank if one rank has no room for a flat.
  std::vector<std::pair<std::string, at::Tensor>> weights(const WeightsOptions& options = {});
  // [all ranks] Streams the same values to rank 0, without memory for all of them at once.
  // `take(name, begin, values)` receives fp32 elements of a parameter, beginning at element
  // `begin`, in row-major order. The memory of `values` is invalid after the call. The last call
  // has the name "". An exception from `take` is thrown on every rank.
  using Take = std::function<void(const std::string& name, int64_t begin, const at::Tensor&)>;
  void stream(const Take& take);
  // Returns the full shape of each parameter, except those that are computed in tiles.
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes();
  // [all ranks] Replaces gradients of a complete accumulation window with full fp32 values, which
  // must be equal on every rank. Throws RuntimeFault if the window is not complete, and ConfigError
  // for a wrong name or shape.
  void set_gradients(const std::vector<std::pair<std::string, at::Tensor>>& gradients);
  // In the following backwards, each gradient is multiplied by `weight` when it is added to the
  // window's sum: once per parameter and backward. Default: 1.
  void set_backward_weight(double weight);
  // Appends `text` to the errors of calls after close(). `text` says what closed the engine, and
  // what to do.
  void set_closed_by(const std::string& text);

  // [all ranks] Returns state that is kept for one parameter between steps. `role` is "param" (the
  // master), a moment by torch's name ("exp_avg"), or "step". "step" is a scalar, the parameter's
  // number of updates; the others are fp32 tensors with the parameter's shape. Throws ConfigError
  // if no such state is kept.
  at::Tensor state(const std::string& param, const std::string& role);
  // [all ranks] Replaces the state that state() returns with `values`, which must be equal on every
  // rank.
  void set_state(const std::string& param, const std::string& role, const at::Tensor& values);
  // Returns this rank's part of the state: the index of its first element, and a copy of it
  // (possibly empty).
  std::pair<int64_t, at::Tensor> local_state(const std::string& param, const std::string& role);
  // [all ranks] Replaces this rank's part of the state.
  void set_local_state(const std::string& param, const std::string& role, const at::Tensor& values);

  // Returns the units that contain these parameters, or every unit if the list is empty.
  std::vector<int> units_of(const std::vector<std::string>& params) const;
  // [all ranks] Gathers the units. Their parameters have full values until release().
  void gather(const std::vector<int>& units, bool write);
  // [all ranks] With `write`, rank 0's values become the weights. Otherwise throws RuntimeFault if
  // the values were changed.
  void release(const std::vector<int>& units, bool write);
  // Must be called instead of release() after an exception on this rank. Not collective. Values
  // that users wrote are lost, unless the parameters rest whole.
  void let_go(const std::vector<int>& units, bool write);

  // Must be called after `param.set_(param)`, which torch.nn.utils.parametrize calls. This write
  // changes nothing, so it is not counted as an edit.
  void set_to_itself(const std::string& param);

  // Returns this rank's slices and their gradients, for a user's optimizer. With `hidden`, slices
  // have memory only inside an update and change_shards() ([Note: Lent shards]).
  std::vector<Shard> shards(bool hidden = false);
  // [all ranks, if masters are sharded] Runs `change`, a method of the user's optimizer, on the
  // slices, and writes the parameters from them. `what` names the method in errors. Throws
  // RuntimeFault inside a forward, a backward or gathered(), and if `change` threw on another rank.
  void change_shards(const std::string& what, const std::function<void()>& change);
  std::vector<at::Tensor> shard_gradients();

 private:
  friend std::map<std::string, int> first_units(const Values& values);
  friend bool hold(Values& values, const std::vector<int>& units);
  friend void let_go_of_held(Values& values, const std::vector<int>& units,
                             const std::string& error);
  friend void abandon_held(Values& values, const std::vector<int>& units, const std::string& error);
  friend void begin_pass(Values& values);
  friend void end_pass(Values& values);
  friend void keep_views(Values& values, const std::vector<int>& units);
  friend void refine_masters(Values& values,
                             const std::vector<std::pair<std::string, at::Tensor>>& loaded);
  struct ParamState;  // src/engine/model/param_state.cpp

  std::vector<std::pair<std::string, at::Tensor>> gradients(const std::string& only);
  void check_may_change(const std::string& what);
  void refuse_edits(const std::vector<int>& units);
  void end_held(const std::vector<int>& units);  // held_units.cpp
  void let_go_of(const std::vector<int>& units, bool write);
  template <class Sink>
  void for_each_weight(bool everywhere, const Sink& sink);

  std::shared_ptr<Core::State> state_;
};

// Must follow Values::gather(). Concerns views of a parameter that are taken after this call. When
// the units are released, such a view gets a copy of the values that it has. Without this call,
// reading the view after the release is an error.
PENSTOCK_API void keep_views(Values& values, const std::vector<int>& units);

// [all ranks] Must follow Values::release() with `write`. `loaded` has the values that were copied
// into parameters between gather() and release(), in any floating dtype. Masters take these values
// instead of the rounded values of the parameters. Only the values of the first rank of each stage
// count.
PENSTOCK_API void refine_masters(Values& values,
                                 const std::vector<std::pair<std::string, at::Tensor>>& loaded);

}  // namespace penstock
