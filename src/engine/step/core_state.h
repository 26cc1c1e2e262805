#pragma once
// Core::State: the state of an engine and its reactions to the events of eager code
// (core_state.cpp). core_setup.cpp builds it from a model, and restore_model.cpp gives the model
// back at close(). The public calls are in core.cpp, model/values.cpp, model/param_state.cpp,
// model/checkpoints.cpp, watch/report.cpp and watch/metrics.cpp. Used only by the model's thread,
// or by autograd's thread while a backward runs.
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"
#include "penstock/plan.h"
#include "src/ckpt/saver.h"
#include "src/engine/mesh/model_ranks.h"
#include "src/engine/mesh/whole_params.h"
#include "src/engine/model/exposed_tensors.h"
#include "src/engine/model/held_units.h"
#include "src/engine/step/accumulation_window.h"
#include "src/engine/step/autograd_hooks.h"
#include "src/engine/step/calling_thread.h"
#include "src/engine/step/driver.h"
#include "src/engine/step/layer_exchanges.h"
#include "src/engine/step/loss_scale.h"
#include "src/engine/step/order_learner.h"
#include "src/engine/step/outer_step.h"
#include "src/engine/step/outside_edits.h"
#include "src/engine/step/outside_reads.h"
#include "src/engine/watch/monitor.h"
#include "src/exec/executor.h"
#include "src/mem/tiers.h"
#include "src/plan/planner.h"
#include "src/tiles/weights.h"

namespace penstock {

struct Core::State final : std::enable_shared_from_this<Core::State>, tiles::Host {
  State(const ModelTree& tree, const Config& settings, std::shared_ptr<Group> ranks,
        bool external_optimizer, std::shared_ptr<Group> nodes);
  ~State() override;

  // Must follow the constructor: the hooks hold weak pointers to this object.
  void install_hooks();

  // ---- events. forward_begin() and forward_end() are those of unit 0, the root.
  void forward_begin(bool grad_enabled);
  void forward_end(const std::vector<at::Tensor>& outputs);
  bool returns_to_units();
  void unit_begin(int unit);
  void unit_again(int unit);
  void unit_end(int unit, const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::string& error);
  void failed(const char* what, const std::string& error);

  // ---- calls of the tiled operators (see [Note: Tiles])
  void enter_tile(int unit) override;
  void leave_tile(int unit, Mark in_backward) override;
  bool begin_tile_backward(bool uses) override;
  void take_tile_gradient(int unit, const at::Tensor& gradient) override;
  void run_in_backward(const std::function<void()>& work) override { in_hook(work); }

  bool step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external,
            const std::string& options);
  // Handles the changes that users made to `.grad` since the last call of this function. `adds`: a
  // backward is about to add gradients.
  void look_at_gradients(bool adds);
  // Drops the window and its accumulated gradients, including those of a backward that raised.
  void drop_gradients();
  // Returns the factor between the accumulated and the averaged gradient.
  double divisor() const;
  // [all ranks, with `gather`] Gives the model back. With `gather` every rank has full parameters
  // afterwards, even after a failure. Without it the call needs no peer. `why`: the user's error
  // that caused the close, or "". Returns a remark on the weights, or "". Throws RuntimeFault,
  // after releasing everything, if the weights could not be gathered.
  std::string close(bool gather, const std::string& why);
  void check_open(const char* call) const;  // throws RuntimeFault if closed

  Config config;
  std::shared_ptr<Group> group;
  mem::Tiers tiers;  // also has the recorder
  std::vector<std::string> unit_names;
  std::vector<std::string> unit_modules;
  ModelDesc model;
  std::string choice;  // the alternatives and the choice of `offload: "auto"`; else ""
  std::optional<exec::Executor> executor;
  std::optional<engine::ActivationMemory> activation_memory;
  std::optional<engine::Driver> driver;
  std::optional<engine::OuterStep> outer;  // set if nodes train on their own
  TableWires planned_wires;                // of the driver's plans
  exec::UpdateRules rules;                 // of the same plans
  std::optional<engine::OutsideEdits> border;
  std::vector<engine::GradientHook> hooks;
  std::unique_ptr<engine::FrozenParams> frozen;  // set if the engine is for inference
  engine::ModelRanks model_ranks;
  std::optional<engine::WholeParams> wholes;
  bool moves_params = false;          // parameters are sometimes not ready for computing
  bool unit_events = false;           // begin and end of a unit move some of its state
  std::optional<c10::Stream> stream;  // the caller's at initialize(); devices only

  int64_t steps = 0;
  std::optional<engine::AccumulationWindow> window;
  std::optional<engine::OrderLearner> order;
  std::optional<engine::LayerExchanges> exchanges;  // set if layers make any
  // Training forwards since the last backward, and the graphs of their outputs.
  struct Forwards {
    int begun = 0;
    std::vector<device::WeakNodePtr> graphs;
  };
  Forwards forwards;
  // The progress of the current forward and backward in one unit.
  struct Progress {
    engine::GraphPlace began;  // where its last forward began
    // Since the last backward: the number of training forwards whose outputs have gradients, and
    // where the last of these forwards began.
    int forwards = 0;
    engine::GraphPlace last_forward;
    // While the backward is in a use of the unit: where the forward of that use began.
    std::optional<engine::GraphPlace> entered;
    int waiting = 0;        // gradients still missing in this backward
    bool expected = false;  // gradients were missing when the backward began
    int gathered = 0;       // open gathered() blocks
    int written = 0;        // those of them with write=True
  };
  std::vector<Progress> progress;  // by unit
  // Units whose backward does not end with the arrival of a gradient: it may still read frozen
  // weights, or a parameter of the unit may get no gradient.
  std::vector<int> open_units;
  int64_t seen_before = 0;                 // backwards of the window before the current one
  double backward_weight = 1.0;            // see Values::set_backward_weight()
  int passes = 0;                          // open passes over the weights: begin_pass()
  engine::LentShards lent;                 // shards of masters that a user's optimizer holds
  std::vector<at::Tensor> lent_gradients;  // their gradients, only during that optimizer's step
  std::exception_ptr fault;  // thrown by a hook: autograd keeps its text but not its class
  enum class Raised : uint8_t { kNone, kByModel, kByEngine };
  Raised raised = Raised::kNone;  // what ended the last backward early
  engine::LossScale loss_scale;
  int64_t skipped = 0;   // steps skipped because of overflow
  std::string overflow;  // error text of the last skipped step
  bool faulted = false;  // a forward, backward or update raised, and no forward has begun since
  std::string trouble;   // step, call and text of that error
  bool closed = false;
  std::string closed_by;  // see Values::set_closed_by()
  std::optional<engine::Monitor> monitor;
  int save_wanted = 0, save_agreed = 0;       // urgency asked by this rank; agreed by all ranks
  std::string unloaded;                       // error text after a load that did not finish
  std::string save_failure;                   // of a background save, until it is reported
  int64_t bytes_read = 0, bytes_written = 0;  // by the last load and by the last save
  std::optional<tiles::TiledWeights> tiled;
  std::optional<engine::OutsideReads> outside_reads;
  engine::CallingThread calling;
  ckpt::Saver saver;  // the last member, so that it ends first

  struct BackwardEnd;    // backward_end.h
  struct Checkpointing;  // checkpoints.cpp
  struct Observer;       // observer.h
  struct Planning;       // planning.h
  struct StageBackward;  // stage_backward.h

 private:
  struct Closing;  // restore_model.cpp

  // Runs a hook's work and keeps what it throws, for Core::backward_failed().
  template <class Work>
  void in_hook(const Work& work) {
    try {
      work();
    } catch (...) {
      fault = std::current_exception();
      throw;
    }
  }

  void prepare_step(const std::vector<OptimizerConfig>& groups);
  void watch_outside_reads();
  void start_backward(bool in_autograd = true);
  // `since`: where the forward of this use began. `at`: the place that the backward has reached.
  void backward_enter(int unit, const engine::GraphPlace& since, const engine::GraphPlace& at);
  void gradient_arrived(int unit, int flat, int slot);
  void take_gradient(int unit, int flat, int slot, const at::Tensor& gradient);
  void complete_open(int except, const engine::GraphPlace& at);
  void unit_complete(int unit);
  void end_backward();
};

}  // namespace penstock
