#pragma once
// Core: the engine proper, driven by events. Both fronts (Python, C++) tell it when a unit begins
// and ends; it needs no Python and no particular module class.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/config.h"
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
};
struct ParamInfo {
  std::string name;
  at::Tensor param;
  int group = 0;   // optimizer parameter group
  int whole = -1;  // of a tile: the parameter it is rows of
};
struct ModelTree {
  std::vector<ModuleInfo> modules;
  std::vector<ParamInfo> params;
  std::vector<at::Tensor> buffers;    // made equal to rank 0's; never cast
  std::shared_ptr<ShardedInit> init;  // where values of hollow parameters are; may be null
};

// A piece of a parameter for an optimizer of the user's own: fp32, one dimension, maybe empty.
struct Shard {
  std::string name;
  at::Tensor param;
  at::Tensor master;
};

// Bytes on this rank: predicted per strategy, and what the running one took at most. In memory
// (device and host) by role, and in swap files.
struct LedgerEntry {
  int64_t param = 0, grad = 0, optim = 0, buffers = 0, total = 0;
  int64_t disk = 0;
  int64_t device = 0, host = 0;  // the peaks of `total`, by tier
  int64_t act = 0;  // measured only: inputs of recomputed units in host memory, beside the total
  int64_t exchanges = 0;  // with peers in a step; measured: in the last one
};
struct LedgerReport {
  std::map<std::string, LedgerEntry> predicted;
  LedgerEntry measured;
  int64_t disk_read = 0, disk_written = 0;  // so far
  std::string strategy;
};

class Engine;

// Owned by one front. All calls from the thread that runs the model, except that autograd's thread
// calls the hooks. Methods marked [all ranks] are collective.
class PENSTOCK_API Core {
 public:
  // [all ranks] Shards the model in place, rank 0's values everywhere. `external_optimizer` leaves
  // the update to the front (step()'s callback). Throws ConfigError; RuntimeFault when ranks
  // disagree on the model or the config (with the first difference).
  Core(const ModelTree& tree, const Config& config, std::shared_ptr<Group> group,
       bool external_optimizer = false);
  ~Core();

  // Module names by unit; unit 0 is the root.
  const std::vector<std::string>& unit_modules() const;
  // Whether units need begin/end events (something of theirs moves); the root always does.
  bool needs_unit_events() const;

  // Names of the parameters that are in tiles (penstock/tiling.h); whether a unit is one of those.
  std::vector<std::string> tiled() const;
  bool is_tile(int unit) const;

  void unit_begin(int unit, bool grad_enabled);
  void unit_end(int unit, const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::string& error);

  // Units whose forward the front computes again in backward: it calls unit_again() before that.
  std::vector<int> recomputed_units() const;
  void unit_again(int unit);
  // Whether their inputs wait elsewhere meanwhile. Then the front keeps, for each input, what
  // save_input() returns: called, it gives the values back; destroyed, it lets them go.
  bool moves_activations() const;
  std::function<at::Tensor()> save_input(int unit, const at::Tensor& input);
  int64_t saved_bytes() const;  // of inputs that wait now, in memory and on disk

  // To be called before backward(loss, gradient): the gradient to start from, `gradient` (default:
  // ones) times the loss scale; undefined when torch's own default will do. Throws RuntimeFault
  // when there was no forward.
  at::Tensor start_backward(const at::Tensor& loss, const at::Tensor& gradient = {});
  // After a backward that threw `error`: throws what a hook of the engine threw, if one did.
  void backward_failed(const std::string& error);
  // Whether a step would apply now: enough backwards were seen, or one and `force`.
  bool window_complete(bool force) const;
  // [all ranks] Updates; `groups` by parameter group, `external` the user's optimizer. False when
  // fp16 gradients overflowed: the weights are unchanged and the loss scale is smaller. Throws
  // RuntimeFault naming the first parameter whose gradient is not finite when no scale helps.
  bool step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external = {});
  double grad_norm() const;
  int64_t steps() const;
  double loss_scale() const;      // of the next backward; 1 without fp16
  int64_t skipped_steps() const;  // for overflow
  std::string overflow() const;   // what the last skipped step says, or empty

  // By parameter (as in ModelTree), when the optimizer's groups changed.
  void set_groups(const std::vector<int>& group_of_param);

  std::vector<Shard> shards();
  std::vector<at::Tensor> shard_gradients();

  // [all ranks] Full fp32 gradients / weights by parameter name.
  std::vector<std::pair<std::string, at::Tensor>> full(const std::string& role);
  // Replaces gradients of a complete window, by full fp32 values that are equal on every rank.
  // Throws RuntimeFault in the middle of a window, ConfigError for a name or shape that is wrong.
  void set_gradients(const std::vector<std::pair<std::string, at::Tensor>>& gradients);
  // [all ranks] Parameters of these units (all when empty) are whole until release().
  void gather(const std::vector<int>& units);
  void release(const std::vector<int>& units, bool write);
  std::vector<int> units_of(const std::vector<std::string>& params) const;

  LedgerReport ledger() const;
  std::string explain() const;
  std::string plan_text(const std::string& section) const;
  void set_plan_text(const std::string& section, const std::string& text);

  // [all ranks] Parameters become ordinary full tensors again, or without `gather` empty ones whose
  // reading raises; all memory is returned.
  void close(bool gather);

 private:
  friend class Tiles;
  struct State;
  std::shared_ptr<State> state_;  // shared with autograd hooks, which may outlive the engine
};

}  // namespace penstock
