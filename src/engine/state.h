#pragma once
// Core::State: what happens at each event of eager code. Reports and collective reads are in
// report.cpp, the public calls in core.cpp.
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/core.h"
#include "penstock/plan.h"
#include "penstock/tiling.h"
#include "src/engine/hooks.h"
#include "src/engine/loss_scale.h"
#include "src/engine/order.h"
#include "src/engine/tiling.h"
#include "src/exec/driver.h"
#include "src/exec/executor.h"
#include "src/mem/tiers.h"
#include "src/plan/planner.h"

namespace penstock {

struct Core::State : std::enable_shared_from_this<Core::State> {
  State(const ModelTree& tree, const Config& settings, std::shared_ptr<Group> ranks,
        bool external_optimizer);
  ~State();

  // ---- set-up (setup.cpp)
  Room agree_at_start(const ModelTree& tree, const std::string& print);
  void choose_tiers(const Room& room, bool external_optimizer);
  void set_budgets(const Room& room, bool external_optimizer);
  void adopt(const ModelTree& tree, bool external_optimizer);
  void claim_on_all_ranks(bool external_optimizer);
  void claim_copies(bool external_optimizer);
  exec::Stored claim(const Placement& place, int64_t bytes);
  void claim_chunks(exec::Flat& flat, int count, int num_moments);
  void check_moments(bool external_optimizer) const;
  void adopt_flat(exec::Flat& flat, const std::string& label, const ModelTree& tree);
  at::Tensor initial_values(const exec::Slot& slot, const ModelTree& tree);
  void find_tiles();
  void install_hooks();
  void make_plans();

  // ---- events
  void forward_begin(bool grad_enabled);
  void forward_end(const std::vector<at::Tensor>& outputs);
  void unit_begin(int unit);
  void unit_again(int unit);
  void unit_end(int unit, const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::string& error);
  void failed(const char* what, const std::string& error);
  void backward_enter(int unit);
  void gradient_arrived(int unit, int flat, int slot);

  // ---- tiles (see [Note: Tiles]; tiling.cpp, tiled_ops.cpp)
  struct TileOp;
  struct LinearFunction;
  struct EmbeddingFunction;
  struct CrossEntropyFunction;
  c10::intrusive_ptr<TileOp> tile_op(size_t index, const Bias& bias);
  void tile_enter(int unit);
  void tile_leave(int unit, Mark in_backward);
  void check_tile_backward(bool trains);
  void take_gradient(int unit, int flat, int slot, const at::Tensor& gradient);
  void let_wholes_go();
  void detach_whole(engine::Tiled& one);
  void gather_wholes(const std::vector<int>& units);
  void release_wholes(const std::vector<int>& units, bool write);
  // fp32 tensors for the tiled parameters, among `tensors` by name; where each tile's unit writes.
  std::map<int, at::Tensor> whole_values(bool only_trainable,
                                         std::vector<std::pair<std::string, at::Tensor>>* tensors);
  // Replaces values of tiled parameters by those of their tiles.
  void split_rows(std::map<std::string, at::Tensor>& by_name);
  void copy_rows(const engine::Tiled& one, char* whole, bool to_tiles);
  void return_rows(int unit);  // of a tile, to the user's parameter; at the end
  bool any_in(const engine::Tiled& one, const std::vector<int>& units) const;
  exec::Flat& tile_flat(const engine::Tiled& one, size_t tile);

  // Runs a hook's work and keeps what it throws, for check_backward().
  template <class Work>
  void in_hook(const Work& work) {
    try {
      work();
    } catch (...) {
      fault = std::current_exception();
      throw;
    }
  }

  // ---- what they lead to
  void start_backward();
  void end_backward();
  void unit_complete(int unit);
  void complete_frozen(int except);
  void recover();
  void watch_outside_reads();
  void outside_read(int unit);
  void replan();
  bool step(const std::vector<OptimizerConfig>& groups, const std::function<void()>& external);
  // By how much what was accumulated exceeds the averaged gradient.
  double divisor() const;
  void check_frozen();
  // `whole`: a collective, after which every rank has full parameters. Else only what needs no
  // peer.
  void close(bool whole);
  void check_open(const char* call) const;  // throws RuntimeFault when closed

  // Every rank's text, in rank order.
  std::vector<std::string> share_text(const std::string& label, const std::string& text);
  std::string where() const;  // "rank 1, step 7, micro-step 0"

  Config config;
  std::shared_ptr<Group> group;
  mem::Tiers tiers;
  std::vector<std::string> unit_names;
  std::vector<std::string> unit_modules;
  ModelDesc model;
  std::string choice;  // what `offload: "auto"` chose from, and why; else empty
  ModelDesc assumed;   // before step one
  std::optional<exec::Executor> executor;
  std::optional<exec::Driver> driver;
  std::vector<engine::GradientHook> hooks;
  bool moves_params = false;  // resting parameters are sharded
  bool unit_events = false;   // a unit's begin and end move something of it

  int64_t steps = 0;
  int64_t seen = 0;              // backwards in this window
  bool reduced_last = false;     // the last backward left gradients in `update`
  int64_t forwards = 0;          // training forwards since the last step
  bool backward_armed = false;   // a backward began and did not end
  std::vector<int> waiting;      // by unit: gradients still to come in this backward
  std::vector<int> frozen_open;  // units whose frozen weights may still be read
  std::string bad;               // first non-finite contribution
  std::exception_ptr fault;      // thrown by a hook: autograd passes on its text, not its class
  std::vector<int> spanning;     // units read outside their module: whole for entire passes
  bool recording = false;        // this forward's order
  bool planned = false;          // the order of step one is agreed
  bool scaled = false;           // the next backward's loss went through start_backward()
  engine::LossScale loss_scale;
  int64_t skipped = 0;   // steps, for overflow
  std::string overflow;  // what the last of them says
  bool faulted = false;  // a forward raised and none came after it: the other ranks wait elsewhere
  bool closed = false;
  engine::OrderRecord forward_order, backward_order;
  std::vector<engine::Tiled> tiled;
  std::vector<bool> is_tile;  // by unit
  std::optional<engine::OutsideReads> outside_reads;
};

}  // namespace penstock
