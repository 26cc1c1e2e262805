#pragma once
// Core: the engine, driven by events. Both fronts (Python, C++) report when a unit begins and ends.
// The core needs neither Python nor a particular module class.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "penstock/cut.h"
#include "penstock/export.h"
#include "penstock/group.h"
#include "penstock/init.h"

namespace penstock {

// A model as both fronts describe it. Modules are in pre-order, the root first.
struct ModuleInfo {
  std::string name;  // "" for the root
  std::string type;
  int parent = -1;
  std::vector<int>
      params;     // indices of the parameters it owns directly; a shared one appears in several
  int rows = -1;  // the parameter that is used row by row (Linear, Embedding) and may be tiled
  bool keeps = false;  // it has own buffers that are saved, which forwards may change
};
struct ParamInfo {
  std::string name;
  at::Tensor param;
  int group = 0;   // optimizer parameter group
  int whole = -1;  // for a tile: index of the parameter whose rows it has
  Cut cut{};       // over the tensor axis, from the config's rules
};
struct ModelTree {
  std::vector<ModuleInfo> modules;
  std::vector<ParamInfo> params;
  std::vector<at::Tensor> buffers;    // set to rank 0's values; never cast
  std::shared_ptr<ShardedInit> init;  // holds the values of hollow parameters; may be null
};

// A unit that the engine made of the model: parameters that move together.
struct UnitInfo {
  std::string module;       // the module's name; "" for the root, which is unit 0
  bool is_tile = false;     // rows of a weight (src/tiles/tiling.h); not a module of the model
  bool recomputed = false;  // the front computes its forward again in backward
  bool away = false;        // another rank of the pipeline computes it
};

// Lifetime and step of the engine. Owned by one front. All calls come from the thread that runs the
// model, except that autograd's thread calls the hooks. Methods marked [all ranks] are collective.
// Views of a core have the other methods, for the same thread: Recomputation (below), Values
// (values.h), Report (report.h), Tiles (tiling.h). A view keeps the core's state alive, and so do
// autograd's hooks.
class PENSTOCK_API Core {
 public:
  // [all ranks] Shards the model in place; all ranks take rank 0's values. `external_optimizer`
  // leaves the update to the front (step()'s callback). Throws ConfigError; throws RuntimeFault
  // with the first difference if ranks disagree on the model or the config.
  Core(const ModelTree& tree, const Config& config, std::shared_ptr<Group> group,
       bool external_optimizer = false);
  ~Core();

  // Returns the config in effect: resolved for the number of ranks, "auto" replaced by the chosen
  // tiers.
  const Config& config() const;
  std::vector<UnitInfo> units() const;
  // Returns whether units need begin/end events (some of their state moves). The root always does.
  bool needs_unit_events() const;
  // Sets each parameter's optimizer group (order of ModelTree) after the groups changed.
  void set_groups(const std::vector<int>& group_of_param);

  void unit_begin(int unit, bool grad_enabled);
  void unit_end(int unit, const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::string& error);
  // [all ranks] Returns whether any rank is about to run a forward; `mine`: this rank is. Throws
  // RuntimeFault if only some are and the ranks do not know the order of tiles yet.
  bool any_forward(bool mine);
  // [all ranks] Returns the mean of the values of the ranks with `counts`; 0 if there is none.
  double mean(double mine, bool counts = true) const;
  // Learns the order of the units again, after modules were added or moved.
  void relearn();

  // Must be called before backward(loss, gradient). Returns the gradient to start from: `gradient`
  // (default: ones) times the loss scale; undefined if torch's own default is right. Throws
  // RuntimeFault if no forward ran before.
  at::Tensor start_backward(const at::Tensor& loss, const at::Tensor& gradient = {});
  // Must be called before a backward that starts from gradients of another pipeline stage.
  void resume_backward();
  // After a backward that threw `error`: throws the exception of an engine hook, if a hook threw.
  void backward_failed(const std::string& error);
  // Returns whether a step would apply now: the window is complete, or it has one backward and
  // `force` is set.
  bool window_complete(bool force);
  // [all ranks] Updates the weights. `groups` are the optimizer settings by parameter group.
  // `external` runs the user's optimizer; `options` describes its settings. Returns false if fp16
  // gradients overflowed (the weights are unchanged and the loss scale is smaller), or if no
  // backward of the window produced a gradient. Throws RuntimeFault with the name of the first
  // parameter whose gradient is not finite if no scale helps. Throws RuntimeFault if groups or
  // options differ between ranks.
  bool step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external = {},
            const std::string& options = "");
  // Drops the gradients accumulated since the last step.
  void zero_grad();
  int64_t steps() const;

  // The plan of a section ("forward", ...). A plan set in its place must do the same.
  std::string plan_text(const std::string& section) const;
  void set_plan_text(const std::string& section, const std::string& text);

  // [all ranks] Turns parameters, and views of them, back into ordinary full tensors and returns
  // all memory. Without `gather`, sharded parameters have no values any more, and reading them
  // raises. It also gathers after a failure, on new connections, if every rank calls it; ranks that
  // wait for this one are notified. `why`: the error that the core is closed for, if any. Returns a
  // remark on the weights if a step was cut short, else "". Throws RuntimeFault, after releasing
  // everything, if the weights could not be gathered.
  std::string close(bool gather, const std::string& why = {});

 private:
  friend class Checkpoints;
  friend class Metrics;
  friend class PipelineRanks;
  friend class Recomputation;
  friend class Report;
  friend class SequenceRanks;
  friend class TensorRanks;
  friend class Tiles;
  friend class Values;
  struct State;
  // Shared with views and autograd hooks, which may outlive the core.
  std::shared_ptr<State> state_;
};

// Units whose forward the front computes again in backward (UnitInfo::recomputed), and their saved
// inputs.
class PENSTOCK_API Recomputation {
 public:
  explicit Recomputation(Core& core) : state_(core.state_) {}

  // Must be called before a unit's forward is computed again.
  void begin(int unit);
  // Returns whether the units' inputs are moved to another tier until then. If so, the front calls
  // save() for each input and keeps the result: calling it returns the values, destroying it frees
  // them.
  bool moves_inputs() const;
  std::function<at::Tensor()> save(int unit, const at::Tensor& input);
  int64_t saved_bytes() const;  // of inputs that are saved now, in memory and on disk

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
