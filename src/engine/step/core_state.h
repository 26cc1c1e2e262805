#pragma once
// Core::State: what happens at each event of eager code (core_state.cpp). From a model to its first
// plan is in core_setup.cpp, the end in restore_model.cpp; the public calls are in core.cpp,
// values.cpp and report.cpp.
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
#include "src/engine/step/accumulation_window.h"
#include "src/engine/step/autograd_hooks.h"
#include "src/engine/step/driver.h"
#include "src/engine/step/loss_scale.h"
#include "src/engine/step/order_learner.h"
#include "src/engine/step/outside_edits.h"
#include "src/engine/watch/monitor.h"
#include "src/exec/executor.h"
#include "src/mem/tiers.h"
#include "src/plan/planner.h"
#include "src/tiles/weights.h"

namespace penstock {

struct Core::State final : std::enable_shared_from_this<Core::State>, tiles::Host {
  State(const ModelTree& tree, const Config& settings, std::shared_ptr<Group> ranks,
        bool external_optimizer);
  ~State() override;

  // After the constructor, when there is a shared pointer to this (core_setup.cpp).
  void install_hooks();

  // ---- events. Unit 0, the root, is forward_begin() and forward_end().
  void forward_begin(bool grad_enabled);
  void forward_end(const std::vector<at::Tensor>& outputs);
  void unit_begin(int unit);
  void unit_again(int unit);
  void unit_end(int unit, const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::string& error);
  void failed(const char* what, const std::string& error);

  // ---- what tiles' operators ask for (see [Note: Tiles])
  void enter_tile(int unit) override;
  void leave_tile(int unit, Mark in_backward) override;
  bool begin_tile_backward() override;
  void take_tile_gradient(int unit, const at::Tensor& gradient) override;
  void run_in_backward(const std::function<void()>& work) override { in_hook(work); }

  bool step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external,
            const std::string& options);
  // What users did to gradients since the last call. `adds`: a backward begins.
  void look_at_gradients(bool adds);
  // Drops the window: nothing was accumulated.
  void drop_gradients();
  // By how much what was accumulated exceeds the averaged gradient.
  double divisor() const;
  // After a backward of a stage, which may have no parameter that trains.
  void end_backward_of_stage();
  // `gather`: a collective, after which every rank has full parameters, also after failures. Else
  // only what needs no peer. `why` it ends, where that is an error of the user's. Returns what is
  // to be said of the weights, or nothing. Throws RuntimeFault, when all is let go of, if the
  // weights could not be gathered.
  std::string close(bool gather, const std::string& why);
  void check_open(const char* call) const;  // throws RuntimeFault when closed

  Config config;
  std::shared_ptr<Group> group;
  mem::Tiers tiers;  // with the recorder
  std::vector<std::string> unit_names;
  std::vector<std::string> unit_modules;
  ModelDesc model;
  std::string choice;  // what `offload: "auto"` chose from, and why; else empty
  std::optional<exec::Executor> executor;
  std::optional<engine::Driver> driver;
  std::optional<engine::OutsideEdits> border;
  std::vector<engine::GradientHook> hooks;
  engine::ModelRanks model_ranks;
  std::optional<engine::WholeParams> wholes;
  bool moves_params = false;  // parameters do not rest where they compute
  bool unit_events = false;   // a unit's begin and end move something of it

  int64_t steps = 0;
  std::optional<engine::AccumulationWindow> window;
  std::optional<engine::OrderLearner> order;
  std::vector<uint64_t> began;   // by unit: when its last forward did
  std::vector<int> waiting;      // by unit: gradients still to come in this backward
  std::vector<int> written;      // by unit: gathered() that will write it back
  std::vector<bool> expected;    // by unit: some were, when it began
  int64_t seen_before = 0;       // backwards of the window, when the last was told
  std::vector<int> frozen_open;  // units whose frozen weights may still be read
  std::vector<at::Tensor> lent;  // windows into state that users have: an optimizer's shards
  std::vector<at::Tensor> lent_gradients;  // and their gradients, while it steps
  std::exception_ptr fault;  // thrown by a hook: autograd passes on its text, not its class
  engine::LossScale loss_scale;
  int64_t skipped = 0;   // steps, for overflow
  std::string overflow;  // what the last of them says
  bool faulted = false;  // a forward raised and none came after it: the other ranks wait elsewhere
  std::string trouble;   // where and with what
  bool closed = false;
  std::optional<engine::Monitor> monitor;
  int save_wanted = 0, save_agreed = 0;       // by this rank; by any, since the last step
  std::string unloaded;                       // a load that did not end: what there is, is nobody's
  std::string save_failure;                   // of a save that nobody waited for, until it is told
  int64_t bytes_read = 0, bytes_written = 0;  // of checkpoints: the last load, the last save
  std::optional<tiles::TiledWeights> tiled;
  std::optional<engine::OutsideReads> outside_reads;
  ckpt::Saver saver;  // last: it ends first

  struct Checkpointing;  // checkpoints.cpp
  struct Observer;       // observer.h

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

  void watch_outside_reads();
  void start_backward(bool in_autograd = true);
  void backward_enter(int unit);
  void gradient_arrived(int unit, int flat, int slot);
  void take_gradient(int unit, int flat, int slot, const at::Tensor& gradient);
  void complete_frozen(int except);
  void unit_complete(int unit);
  void end_backward();
  void make_plans();
};

}  // namespace penstock
