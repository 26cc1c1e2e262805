#pragma once
// OuterStep: joins nodes that train on their own (comm.codec "local").
//
// [Note: Outer steps] The engine's group has the ranks of one node, so gradients, norms, checks and
// publishes stay inside the node, and nodes need no fast link between them. After every
// `comm.outer_every` steps, all nodes make an outer step (DiLoCo, arXiv:2311.08105). The outer
// gradient of a node is the change of its masters since the last outer step, with opposite sign.
// SGD with Nesterov momentum applies the mean of these gradients to the masters of the last outer
// step, the anchors. The result becomes the masters of all nodes. The optimizer's own state stays
// as it is in each node.
//
// Each rank exchanges its shards with the ranks at the same position in the other nodes. The wire
// rounds stochastically, and all nodes decode the same bytes, so their masters have the same bits
// after an outer step. Anchors and momenta are in host memory, in fp32.
//
// Anchors are read before the first step after an outer step, so weights that users write in
// between are part of the anchors.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/checkpoint.h"
#include "penstock/config.h"
#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/engine/model/flat_state.h"
#include "src/exec/executor.h"
#include "src/mem/tiers.h"
#include "src/plan/route.h"

namespace penstock::engine {

// Throws ConfigError if the config asks for outer steps and the ranks cannot make them.
void check_outer(const Config& config, const Group* nodes, bool scales_loss);

// Used only by the model's thread.
class OuterStep {
 public:
  // `nodes`: the ranks at this rank's position in all nodes, by node. `rank`: in the node.
  // `executor` and `tiers` must outlive this object.
  OuterStep(std::shared_ptr<Group> nodes, const CommConfig& comm, exec::Executor& executor,
            mem::Tiers& tiers, int rank);

  // Returns a broadcast of the first node's values to the ranks at this position.
  std::function<void(const std::string& label, void* data, int64_t bytes)> broadcasts();
  // Takes the memory of anchors and momenta.
  void claim();

  int node() const { return nodes_->rank(); }
  int num_nodes() const { return nodes_->size(); }
  // Returns the number of steps to the next outer step; 0 if the last step was one, or before
  // step 1.
  int64_t steps_left() const {
    return since_ == 0 ? 0 : std::max<int64_t>(1, comm_.outer_every - since_);
  }

  // Reads the anchors if there was no step since the last outer step. Must precede each update.
  void before_update();
  // [all ranks of all nodes, at outer steps] Counts a step, and makes an outer step if it is due.
  // `step`: the number of the training step.
  void after_update(int64_t step);
  // Tells nodes that wait for this rank in an outer step that it has raised an error, until
  // went_on(). `owes`: because of the error, some collectives of its node were not made.
  void failed(const std::string& error, bool owes);
  void went_on();
  // The next update reads the anchors again.
  void forget_anchors();
  // Forgets the anchors, and makes all momenta zero, as before the first step.
  void restart();

  // [ranks at one position of all nodes] Adds up the values over the nodes.
  std::vector<double> sum(const std::string& label, const std::vector<double>& values);
  // [all ranks of all nodes] Calls `check` on every node, and then `work` on the first node.
  // Returns its result on every node. If one of them throws, every node throws. `asked` must be the
  // same text on all nodes.
  std::string on_first_node(const std::string& label, const std::string& asked,
                            const std::function<void()>& check,
                            const std::function<std::string()>& work);
  // A load, and the number of steps after it.
  struct Loading {
    std::function<FoundCheckpoint()> load;
    std::function<int64_t()> steps;
  };
  // [all ranks of all nodes] Calls `load`. If a node fails, or nodes load different checkpoints,
  // all of them throw. Nodes whose state was replaced then set `unloaded` to the reason.
  FoundCheckpoint alike(const Loading& loading, std::string* unloaded);

  // Returns this rank's momenta, to save them or to fill them from a checkpoint.
  FlatParts momenta() const;

  // `together`: all ranks of all nodes close their engines. `fault`: why this rank's training
  // ended, or "". Does not throw.
  void close(bool together, const std::string& fault);

  std::string text() const;  // one line for explain()

 private:
  // A flat that trains, with this rank's part of its anchor and momentum.
  struct Outer {
    int unit = 0;
    exec::Flat* flat = nullptr;
    int64_t numel = 0;
    mem::Lease anchor, momentum;
  };
  struct Caught;
  at::Tensor anchor_of(const Outer& one) const;
  at::Tensor momentum_of(const Outer& one) const;
  void begin_turn();
  void compare_anchors();
  void check_finite(const Outer& one, const at::Tensor& gradient) const;
  void copy_masters(const Outer& one, char* to);
  void join(std::vector<Outer>& unit, int64_t step);
  std::vector<std::string> share(const std::string& label, const std::string& text);
  int64_t sent_bytes() const;  // by this rank in one outer step
  Mesh mesh_of(const exec::Flat& flat) const { return flat.placement.mesh(executor_.mesh()); }

  std::shared_ptr<Group> nodes_;
  const CommConfig comm_;
  exec::Executor& executor_;
  mem::Tiers& tiers_;
  const int rank_;   // in its node
  const Mesh mesh_;  // the nodes
  const Groups groups_;
  comm::Channel channel_;
  Members everyone_;
  std::vector<std::vector<Outer>> units_;
  int64_t since_ = 0;
  bool failed_ = false;
};

}  // namespace penstock::engine
