#pragma once
// Core: the engine proper, driven by events. Both fronts (Python, C++) tell it when a unit begins
// and ends; it needs no Python and no particular module class.
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

// A model as both fronts describe it. Modules in pre-order, the root first.
struct ModuleInfo {
  std::string name;  // "" for the root
  std::string type;
  int parent = -1;
  std::vector<int> params;  // indices of those it owns directly; shared ones appear in several
  int rows = -1;            // of them, the one used row by row (Linear, Embedding): it may be tiled
  bool keeps = false;       // it has buffers of its own that are saved: forwards may change them
};
struct ParamInfo {
  std::string name;
  at::Tensor param;
  int group = 0;   // optimizer parameter group
  int whole = -1;  // of a tile: the parameter it is rows of
  Cut cut{};       // over the tensor axis; the config's rules say
};
struct ModelTree {
  std::vector<ModuleInfo> modules;
  std::vector<ParamInfo> params;
  std::vector<at::Tensor> buffers;    // made equal to rank 0's; never cast
  std::shared_ptr<ShardedInit> init;  // where values of hollow parameters are; may be null
};

// What the engine made of the model: parameters that move together.
struct UnitInfo {
  std::string module;    // its name; "" for the root, which is unit 0
  bool is_tile = false;  // rows of a weight (penstock/tiling.h), which no module of the user's is
  bool recomputed = false;  // its forward is computed again in backward, by the front
  bool away = false;        // another rank of the pipeline computes it
};

// Life and step of the engine. Owned by one front. All calls from the thread that runs the model,
// except that autograd's thread calls the hooks. Methods marked [all ranks] are collective. The
// rest is in views of a core, for the same thread: Recomputation (below), Values (values.h), Report
// (report.h) and Tiles (tiling.h). A view keeps what it looks at alive, as autograd's hooks do.
class PENSTOCK_API Core {
 public:
  // [all ranks] Shards the model in place, rank 0's values everywhere. `external_optimizer` leaves
  // the update to the front (step()'s callback). Throws ConfigError; RuntimeFault when ranks
  // disagree on the model or the config (with the first difference).
  Core(const ModelTree& tree, const Config& config, std::shared_ptr<Group> group,
       bool external_optimizer = false);
  ~Core();

  // As it is in effect: resolved for the ranks, with the tiers that "auto" became.
  const Config& config() const;
  std::vector<UnitInfo> units() const;
  // Whether units need begin/end events (something of theirs moves); the root always does.
  bool needs_unit_events() const;
  // By parameter (as in ModelTree), when the optimizer's groups changed.
  void set_groups(const std::vector<int>& group_of_param);

  void unit_begin(int unit, bool grad_enabled);
  void unit_end(int unit, const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::string& error);
  // [all ranks] Whether any rank is about to run a forward (`mine`: this one is). Throws
  // RuntimeFault where some are and some are not, and the ranks do not know the order of tiles yet.
  bool any_forward(bool mine);
  // [all ranks] The mean of the values of the ranks that count; 0 where none does.
  double mean(double mine, bool counts = true) const;
  // Modules were put in or moved: the order of the units is learned again.
  void relearn();

  // To be called before backward(loss, gradient): the gradient to start from, `gradient` (default:
  // ones) times the loss scale; undefined when torch's own default will do. Throws RuntimeFault
  // when there was no forward.
  at::Tensor start_backward(const at::Tensor& loss, const at::Tensor& gradient = {});
  // To be called before a backward from gradients that another stage of the pipeline sent.
  void resume_backward();
  // After a backward that threw `error`: throws what a hook of the engine threw, if one did.
  void backward_failed(const std::string& error);
  // Whether a step would apply now: enough backwards were seen, or one and `force`.
  bool window_complete(bool force);
  // [all ranks] Updates; `groups` by parameter group, `external` the user's optimizer, `options` a
  // text of what it was set to. False when fp16 gradients overflowed (the weights are unchanged and
  // the loss scale is smaller), or when no backward of the window gave a gradient. Throws
  // RuntimeFault naming the first parameter whose gradient is not finite when no scale helps, and
  // where groups or options are not the same on every rank.
  bool step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external = {},
            const std::string& options = "");
  // Drops what backwards accumulated since the last step.
  void zero_grad();
  int64_t steps() const;

  // The plan of a section ("forward", ...), and another in its place, which must do the same.
  std::string plan_text(const std::string& section) const;
  void set_plan_text(const std::string& section, const std::string& text);

  // [all ranks] Parameters become ordinary full tensors again, and so do views of them; without
  // `gather` those that are sharded have no values any more, and reading them raises. All memory is
  // returned. It gathers after failures too, on connections of its own, when every rank comes:
  // ranks that wait for this one are told. `why`: the error that it is closed for, if any. Returns
  // what is to be said of the weights (a step was cut short), or nothing. Throws RuntimeFault, with
  // everything let go of, when the weights could not be gathered.
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
  std::shared_ptr<State>
      state_;  // shared with views and autograd hooks, which may outlive the core
};

// Units whose forward the front computes again in backward (UnitInfo::recomputed), and what waits
// for that.
class PENSTOCK_API Recomputation {
 public:
  explicit Recomputation(Core& core) : state_(core.state_) {}

  // To be called before a unit's forward is computed again.
  void begin(int unit);
  // Whether the units' inputs wait elsewhere meanwhile. Then the front keeps, for each input, what
  // save() returns: called, it gives the values back; destroyed, it lets them go.
  bool moves_inputs() const;
  std::function<at::Tensor()> save(int unit, const at::Tensor& input);
  int64_t saved_bytes() const;  // of inputs that wait now, in memory and on disk

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
