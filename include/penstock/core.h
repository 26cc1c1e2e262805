#pragma once
// Core: the engine, driven by events. Both fronts (Python, C++) report when a unit begins and ends.
// The core needs neither Python nor a particular module class.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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
  std::vector<int> params;  // indices of its own parameters; modules may share them
  int rows = -1;       // index of the weight used by rows (Linear, Embedding), which may be tiled
  bool keeps = false;  // it owns buffers; checkpoints save them, and a forward may change them
};
struct ParamInfo {
  std::string name;
  at::Tensor param;
  int group = 0;   // optimizer parameter group
  int whole = -1;  // for a tile: index of the parameter whose rows the tile has
  Cut cut{};       // from the config's rules
};
struct BufferInfo {
  std::string name;
  at::Tensor buffer;
  int follows = -1;  // index of the parameter whose dtype it takes; -1: keeps its own
};
struct ModelTree {
  std::vector<ModuleInfo> modules;
  std::vector<ParamInfo> params;
  std::vector<BufferInfo> buffers;    // set to rank 0's values
  std::shared_ptr<ShardedInit> init;  // holds the values of hollow parameters; may be null
  // The device to which the engine moves parameters and buffers. If it is not set, they must all be
  // on one device and stay there.
  std::optional<c10::Device> device{};
};

// A unit of the model: parameters that move together.
struct UnitInfo {
  std::string module;       // the module's name; "" for the root, which is unit 0
  bool is_tile = false;     // rows of a weight (src/tiles/tiling.h); not a module of the model
  bool recomputed = false;  // the front computes its forward again in backward
  bool away = false;        // another rank of the pipeline computes it
};

// The engine's lifetime and training step. Owned by one front. All calls come from the model's
// thread (the thread that runs the model), except that autograd's thread calls the hooks. Methods
// marked [all ranks] are collective. Views of a core have the remaining methods, for the same
// thread: Recomputation (below), Values (values.h), Report (report.h), Tiles (tiling.h). Views and
// autograd's hooks keep the core's state alive.
class PENSTOCK_API Core {
 public:
  // [all ranks] Shards the model in place; all ranks take rank 0's values. With
  // `external_optimizer`, the callback that the front passes to step() does the update. Throws
  // ConfigError if a setting cannot work. Throws RuntimeFault with the first difference if ranks
  // disagree on the model or the config. `nodes`: only for comm.codec "local", where `group` has
  // the ranks of one node: the ranks at the same position in all nodes, by node.
  Core(const ModelTree& tree, const Config& config, std::shared_ptr<Group> group,
       bool external_optimizer = false, std::shared_ptr<Group> nodes = {});
  ~Core();

  // Returns the config in effect: it is resolved for the number of ranks, and has the chosen tiers
  // in place of "auto".
  const Config& config() const;
  std::vector<UnitInfo> units() const;
  // Returns whether units need begin/end events. They do if some of their state moves; the root
  // always does.
  bool needs_unit_events() const;
  // Sets the optimizer group of each parameter (in the order of ModelTree) after groups changed.
  void set_groups(const std::vector<int>& group_of_param);

  void unit_begin(int unit, bool grad_enabled);
  void unit_end(int unit, const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::string& error);
  // [all ranks] Returns whether any rank is about to run a forward. `mine`: whether this rank is
  // about to run one. Throws RuntimeFault if only some ranks run a forward while the order of tiles
  // is unknown.
  bool any_forward(bool mine);
  // [all ranks] Returns the mean of `mine` over the ranks that set `counts`; 0 if no rank sets it.
  double mean(double mine, bool counts = true) const;
  // Learns the order of the units again, after modules were added or moved.
  void relearn();

  // Must be called before backward(loss, gradient). Returns the gradient from which that backward
  // must start: `gradient` (default: ones) times the loss scale. Returns an undefined tensor if
  // that is torch's default gradient. Throws RuntimeFault if no forward ran before.
  at::Tensor start_backward(const at::Tensor& loss, const at::Tensor& gradient = {});
  // Must be called before a backward that starts from gradients of the next pipeline stage.
  void resume_backward();
  // Must be called after a backward that threw `error`. If an engine hook threw, rethrows its
  // exception.
  void backward_failed(const std::string& error);
  // Returns whether a step would be applied now: either the window is complete, or `force` is set
  // and the window has had a backward.
  bool window_complete(bool force);
  // [all ranks] Updates the weights. `groups` has the optimizer settings of each parameter group.
  // `external` runs the user's optimizer; `options` describes its settings. Returns false if fp16
  // gradients overflowed (the weights are unchanged and the loss scale is smaller), or if no
  // backward of the window produced a gradient. If a gradient is not finite and a smaller
  // loss scale cannot help, throws RuntimeFault with the name of the first parameter with such a
  // gradient. Throws RuntimeFault if groups or options differ between ranks.
  bool step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external = {},
            const std::string& options = "");
  // Drops the gradients accumulated since the last step. Without `set_to_none`, the next step uses
  // gradients of zeros, as in torch, for parameters that have had a gradient since the last call
  // with `set_to_none`.
  void zero_grad(bool set_to_none = true);
  int64_t steps() const;

  // Returns or replaces the plan of a section ("forward", ...). A replacement must compute
  // the same results.
  std::string plan_text(const std::string& section) const;
  void set_plan_text(const std::string& section, const std::string& text);

  // [all ranks] Turns parameters, and views of them, back into ordinary full tensors and frees all
  // memory. Without `gather`, sharded parameters have no values afterwards, and reading them
  // throws. After a failure, close() can still gather if every rank calls it, because it makes new
  // connections. close() also notifies ranks that wait for this one. `why`: the error that caused
  // the close, or "". Returns a remark on the weights if a step was cut short, else "". Throws
  // RuntimeFault, after releasing everything, if the weights could not be gathered.
  std::string close(bool gather, const std::string& why = {});

 private:
  friend class Calls;
  friend class Checkpoints;
  friend class Metrics;
  friend class PipelineRanks;
  friend class Recomputation;
  friend class Report;
  friend class SequenceRanks;
  friend class TensorRanks;
  friend class Tiles;
  friend class TokenCaches;
  friend class Values;
  struct State;
  // Shared with views and autograd hooks, which may outlive the core.
  std::shared_ptr<State> state_;
};

// Calls: records which thread is in a call of the engine, and how calls end. A front reports its
// forwards here.
class PENSTOCK_API Calls {
 public:
  explicit Calls(const Core& core) : state_(core.state_) {}

  // Must be called before a forward of the model. Throws RuntimeFault, and changes nothing, if
  // another thread is in a forward, a backward or a step.
  void enter(const std::string& call);
  // Must be called after that forward.
  void leave();
  // Must be called after a backward that Core::start_backward() announced and that did not throw.
  // This includes a backward that reached no parameter here, because it may have reached some on
  // other ranks.
  void end_backward();
  // Must be called if `error` ended a collective call on this rank, even if other ranks had no
  // error.
  void failed(const std::string& call, const std::string& error);
  // Sets the function that error texts use to get a thread's name from the operating system's id of
  // the thread. The function returns "" for a thread that no caller started.
  void name_threads(std::function<std::string(int64_t)> name);

 private:
  std::shared_ptr<Core::State> state_;
};

// Units whose forward runs again in backward (UnitInfo::recomputed), and their saved inputs.
class PENSTOCK_API Recomputation {
 public:
  explicit Recomputation(Core& core) : state_(core.state_) {}

  // Must be called before a unit's forward is computed again.
  void begin(int unit);
  // Returns whether the units' inputs move to another tier until the units are recomputed. If so,
  // the front calls save() for each input and keeps the returned function. Calling the function
  // returns the values; destroying it frees them.
  bool moves_inputs() const;
  std::function<at::Tensor()> save(int unit, const at::Tensor& input);
  int64_t saved_bytes() const;  // bytes of inputs saved now, in memory and on disk

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
