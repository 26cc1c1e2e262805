#include "src/engine/step/outer_step.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <filesystem>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/ckpt/checksum.h"
#include "src/device/kernels.h"
#include "src/engine/step/unit_order.h"
#include "src/engine/step/window_agreement.h"
#include "src/exec/walk.h"
#include "src/plan/strategy.h"

namespace penstock::engine {

namespace {

Move sum_over_nodes(const std::string& wire) {
  Move move;
  move.kind = MoveKind::kAllReduce;
  move.axes = {Axis::kNode};
  move.wire = Wire::parse(wire, Rounding::kStochastic);
  return move;
}

Placement addends() {
  Placement place;
  place.on(Axis::kNode) = Layout::kPartial;
  return place;
}

}  // namespace

void check_outer(const Config& config, const Group* nodes, bool scales_loss) {
  if (!trains_locally(config)) return;
  if (nodes == nullptr || nodes->size() != config.mesh.node) {
    throw ConfigError(concat(
        "[engine::initialize] \"comm.codec\" is \"local\" and \"mesh.node\" is ", config.mesh.node,
        ", but the group does not say which ranks form a node. Use penstock.initialize()"));
  }
  if (!scales_loss) return;
  throw ConfigError(
      "[engine::initialize] \"comm.codec\" is \"local\" and parameters compute in fp16, but nodes "
      "would skip different steps after an overflow. Use bf16");
}

OuterStep::OuterStep(std::shared_ptr<Group> nodes, const CommConfig& comm, exec::Executor& executor,
                     mem::Tiers& tiers, int rank)
    : nodes_(std::move(nodes)),
      comm_(comm),
      executor_(executor),
      tiers_(tiers),
      rank_(rank),
      mesh_(Mesh::of({{Axis::kNode, nodes_->size()}})),
      groups_(mesh_, nodes_->rank()),
      channel_(*nodes_, "outer"),
      everyone_(Members::all(nodes_->rank(), nodes_->size())) {
  channel_.recorder = tiers.recorder;
  begin_turn();
}

std::function<void(const std::string& label, void* data, int64_t bytes)> OuterStep::broadcasts() {
  return [this](const std::string& label, void* data, int64_t bytes) {
    channel_.broadcast(label, everyone_, data, bytes);
  };
}

void OuterStep::claim() {
  std::vector<exec::UnitState>& units = executor_.units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    std::vector<Outer> parts;
    for (exec::Flat& flat : units[unit].flats) {
      if (!flat.trainable) continue;
      Outer& one = parts.emplace_back();
      one.unit = static_cast<int>(unit);
      one.flat = &flat;
      one.numel = flat.numel / num_shards(executor_.table().master(), mesh_of(flat));
      one.anchor = tiers_.host.take(one.numel * 4, mem::Account::kOptim);
      one.momentum = tiers_.host.take(one.numel * 4, mem::Account::kOptim);
    }
    if (!parts.empty()) units_.push_back(std::move(parts));
  }
  restart();
}

at::Tensor OuterStep::anchor_of(const Outer& one) const {
  return device::view(one.anchor.data(), Dtype::kFp32, one.numel);
}

at::Tensor OuterStep::momentum_of(const Outer& one) const {
  return device::view(one.momentum.data(), Dtype::kFp32, one.numel);
}

// The steps between two outer steps are one turn, so a rank that raises an error there has as many
// turns as the other nodes.
void OuterStep::begin_turn() { take_turn(nodes_->board(), "steps", "made steps of its own"); }

void OuterStep::forget_anchors() { since_ = 0; }

void OuterStep::restart() {
  forget_anchors();
  for (const std::vector<Outer>& unit : units_) {
    for (const Outer& one : unit) momentum_of(one).zero_();
  }
}

// Copies this rank's part of the masters to host memory. They may be in chunks, and on any tier.
void OuterStep::copy_masters(const Outer& one, char* to) {
  for (exec::ChunkState& chunk : one.flat->chunks) {
    const int64_t numel = one.flat->chunks.size() > 1 ? chunk.numel : one.numel;
    device::copy(to + chunk.begin * 4, executor_.updates().fetch_master(*one.flat, chunk),
                 numel * 4);
    executor_.traffic().let_go(chunk.optim.back().buffers.front());
  }
  if (!tiers_.computes.is_host()) tiers_.computes.synchronize();
}

void OuterStep::before_update() {
  if (since_ > 0) return;
  executor_.updates().finish();
  for (const std::vector<Outer>& unit : units_) {
    executor_.values().take_edits(unit.front().unit);
    for (const Outer& one : unit) copy_masters(one, static_cast<char*>(one.anchor.data().host()));
  }
}

// Nodes differ if users wrote different values to their weights.
void OuterStep::compare_anchors() {
  uint64_t own = 0;
  for (const std::vector<Outer>& unit : units_) {
    for (const Outer& one : unit) own = own * 31 + ckpt::checksum(anchor_of(one));
  }
  std::string problem;
  const std::vector<std::string> all = share("outer step: anchors", concat(own));
  for (size_t node = 1; node < all.size() && problem.empty(); ++node) {
    if (all[node] == all.front()) continue;
    problem = concat("[engine::outer_step] node 0 and node ", node,
                     " began the steps since the last outer step with different weights. They were "
                     "changed outside the engine, in gathered(write=True) or by load_state_dict(). "
                     "Write the same values on all nodes");
  }
  // The weights may differ in the parts of some ranks only.
  problem = first_problem(executor_, "outer step: anchors", problem);
  if (!problem.empty()) throw RuntimeFault(problem);
}

void OuterStep::after_update(int64_t step) {
  if (++since_ < comm_.outer_every) return;
  executor_.updates().finish();
  for (const exec::UnitState& unit : executor_.units()) unit.param_ready.wait();
  take_turn(nodes_->board(), "outer step", concat("made an outer step after step ", step));
  channel_.set_step(step);
  compare_anchors();
  for (std::vector<Outer>& unit : units_) join(unit, step);
  executor_.traffic().settle();
  since_ = 0;
  begin_turn();
}

void OuterStep::failed(const std::string& error, bool owes) {
  failed_ = true;
  leave_turn(nodes_->board(), error, owes);
}

void OuterStep::went_on() {
  if (!std::exchange(failed_, false)) return;
  if (Board* const board = nodes_->board()) board->turns().went_on();
}

void OuterStep::check_finite(const Outer& one, const at::Tensor& gradient) const {
  if (std::isfinite(gradient.sum().item<double>()) || at::isfinite(gradient).all().item<bool>())
    return;
  throw RuntimeFault(
      concat("[engine::outer_step] a change of parameter \"", one.flat->slots.front().name,
             "\", or of another one of its unit, is not finite on a node. Load a checkpoint"));
}

// Makes the outer step of one unit.
void OuterStep::join(std::vector<Outer>& unit, int64_t step) {
  const Move sum = sum_over_nodes(comm_.outer_wire);
  exec::MeshWalk walk(route(addends(), {sum}, mesh_, nodes_->rank(), false), mesh_, groups_, tiers_,
                      /*on_host=*/true);
  std::vector<at::Tensor> gradients;
  executor_.values().take_edits(unit.front().unit);
  for (const Outer& one : unit) {
    const int64_t numel = outer_numel(one.numel, num_nodes());
    at::Tensor& gradient = gradients.emplace_back(at::zeros({numel}, at::kFloat));
    copy_masters(one, static_cast<char*>(gradient.data_ptr()));
    gradient.narrow(0, 0, one.numel).neg_().add_(anchor_of(one));
    exec::Travel travel{gradient.data_ptr(), gradient.data_ptr(), Dtype::kFp32, Dtype::kFp32,
                        numel};
    travel.noise = hash_text(one.flat->slots.front().name, hash_text(concat("outer ", step)));
    walk.add(travel);
  }
  if (num_nodes() > 1) {
    walk.run(channel_, concat("outer u", unit.front().unit, " ", sum.text()));
  }
  for (size_t i = 0; i < unit.size(); ++i) {
    const at::Tensor gradient = gradients[i].narrow(0, 0, unit[i].numel);
    check_finite(unit[i], gradient);
    at::Tensor anchor = anchor_of(unit[i]), momentum = momentum_of(unit[i]);
    momentum.mul_(comm_.outer_momentum).add_(gradient);
    anchor.sub_(gradient, comm_.outer_lr).sub_(momentum, comm_.outer_lr * comm_.outer_momentum);
    executor_.values().restore(unit[i].unit, *unit[i].flat, executor_.table().master(),
                               static_cast<char*>(anchor.data_ptr()));
  }
}

std::vector<double> OuterStep::sum(const std::string& label, const std::vector<double>& values) {
  take_turn(nodes_->board(), label, concat("computed a ", label, " over all nodes"));
  const auto bytes = values.size() * sizeof(double);
  std::vector<double> sums(values.size(), 0.0), theirs(values.size());
  for (const std::string& one :
       channel_.share(label, everyone_, {reinterpret_cast<const char*>(values.data()), bytes})) {
    std::memcpy(theirs.data(), one.data(), bytes);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += theirs[i];
  }
  begin_turn();
  return sums;
}

std::vector<std::string> OuterStep::share(const std::string& label, const std::string& text) {
  return share_text(label, text, [this](const std::string& what, const std::string& payload) {
    return channel_.share(what, everyone_, payload);
  });
}

// What a call threw, on this node or on another.
struct OuterStep::Caught {
  std::exception_ptr raised;
  std::string text;

  void run(const std::function<void()>& call) {
    try {
      call();
    } catch (const std::exception& error) {
      raised = std::current_exception();
      text = error.what();
    }
  }
  // Throws if any node has thrown. `texts`: the texts of all nodes.
  void rethrow(const std::vector<std::string>& texts) const {
    if (raised) std::rethrow_exception(raised);
    for (size_t node = 0; node < texts.size(); ++node) {
      if (!texts[node].empty()) throw RuntimeFault(concat("node ", node, ": ", texts[node]));
    }
  }
};

std::string OuterStep::on_first_node(const std::string& label, const std::string& asked,
                                     const std::function<void()>& check,
                                     const std::function<std::string()>& work) {
  take_turn(nodes_->board(), label, concat("called ", label, "()"));
  Caught problem;
  problem.run(check);
  const std::vector<std::string> when = share(concat(label, " when"), problem.text);
  const std::vector<std::string> all = share(label, asked);
  begin_turn();
  problem.rethrow(when);
  for (size_t node = 1; node < all.size(); ++node) {
    if (all[node] == all.front()) continue;
    throw ConfigError(concat("[engine::", label, "] node 0 and node ", node,
                             " gave different arguments: \"", all.front(), "\" and \"", all[node],
                             "\""));
  }
  std::string made;
  if (node() == 0) problem.run([&] { made = work(); });
  problem.rethrow(share(concat(label, " of node 0"), problem.text));
  return share(concat(label, " made"), made).front();
}

FoundCheckpoint OuterStep::alike(const Loading& loading, std::string* unloaded) {
  take_turn(nodes_->board(), "load", "called load()");
  share("load begins", "");  // the first node may still write the checkpoint
  FoundCheckpoint found;
  Caught problem;
  problem.run([&] { found = loading.load(); });
  const std::vector<std::string> problems = share("load of nodes", problem.text);
  std::string own = ckpt::hex(hash_text(found.front));
  if (problem.text.empty()) {
    own += concat(" ", std::filesystem::path(found.path).filename().string(), " step ",
                  loading.steps());
  }
  const std::vector<std::string> all = share("load of which", own);
  begin_turn();
  std::string why;
  for (size_t node = 0; node < all.size() && why.empty(); ++node) {
    if (!problems[node].empty()) {
      why = concat("node ", node, ": ", problems[node]);
    } else if (all[node] != own && problem.text.empty()) {
      why = concat("[engine::load] node ", node,
                   " loaded another checkpoint than this node. All nodes must see the same "
                   "undamaged checkpoints");
    }
  }
  if (why.empty()) return found;
  if (problem.text.empty()) {
    *unloaded = concat("[engine::load] the nodes do not have the same checkpoint (", why,
                       "). Load again, or close() the engine");
  }
  problem.rethrow(problems);
  throw RuntimeFault(why);
}

FlatParts OuterStep::momenta() const {
  FlatParts parts;
  const Placement place = executor_.table().master();
  for (const std::vector<Outer>& unit : units_) {
    for (const Outer& one : unit) {
      parts.push_back(part_of(one.unit, *one.flat, momentum_of(one), place,
                              shard_index(place, mesh_of(*one.flat), rank_), kOuterRole));
    }
  }
  return parts;
}

void OuterStep::close(bool together, const std::string& fault) {
  try {
    if (together) {
      nodes_->last_call(fault);
    } else if (!fault.empty()) {
      nodes_->end_exchanges(fault);
    }
  } catch (const std::exception&) {
    // The weights need no other node.
  }
  nodes_->close();
  units_.clear();
}

int64_t OuterStep::sent_bytes() const {
  int64_t bytes = 0;
  for (const std::vector<Outer>& unit : units_) {
    for (const Outer& one : unit) bytes += outer_bytes(comm_, one.numel, num_nodes());
  }
  return bytes;
}

std::string OuterStep::text() const {
  return concat("outer steps: one every ", comm_.outer_every, " steps, over ", num_nodes(),
                " nodes, ", comm_.outer_wire, ", ", sent_bytes(),
                " bytes sent by this rank; steps since the last one: ", since_, "\n");
}

}  // namespace penstock::engine
