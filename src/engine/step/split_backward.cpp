#include "src/engine/step/split_backward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The gradients that arrived at a boundary node.
struct KeptGradients {
  variable_list gradients{};
  std::vector<int64_t> versions{};
};

// Keeps the gradients of the node's first run.
class KeepGradients final : public torch::autograd::FunctionPreHook {
 public:
  explicit KeepGradients(std::shared_ptr<KeptGradients> kept) : kept_(std::move(kept)) {}
  variable_list operator()(const variable_list& gradients) override {
    if (!kept_->gradients.empty()) return gradients;
    kept_->gradients = gradients;
    for (const at::Tensor& one : gradients) {
      kept_->versions.push_back(one.defined() ? one._version() : 0);
    }
    return gradients;
  }

 private:
  std::shared_ptr<KeptGradients> kept_;
};

// Returns whether the node may run twice: it is an operator of torch, and has no hooks but the
// engine's.
bool runs_twice(Node& node) {
  const std::string_view type = typeid(node).name();
  if (type.find("9generated") == std::string_view::npos) return false;
  if (!node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
      !node.post_hooks().empty()) {
    return false;
  }
  return std::all_of(node.pre_hooks().begin(), node.pre_hooks().end(),
                     [](const auto& hook) { return is_unit_hook(*hook); });
}

// Accumulates into `leaves` what arrives at the edges.
void accumulate(const std::vector<Edge>& edges, variable_list gradients,
                const std::vector<at::Tensor>& leaves) {
  std::vector<Edge> ends;
  for (const at::Tensor& leaf : leaves) ends.push_back(torch::autograd::impl::gradient_edge(leaf));
  torch::autograd::Engine::get_default_engine().execute(edges, gradients, /*keep_graph=*/false,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true, ends);
}

// The hook would run in both parts.
void check_hooks(const at::Tensor& leaf) {
  if (torch::autograd::impl::hooks(leaf).empty()) return;
  throw RuntimeFault(concat(
      "[engine::split_backward] a parameter of shape ", concat(leaf.sizes()),
      " has or had a hook, and is used several times in one stage or by an operator that is not "
      "torch's own, so its backward cannot be split. Register no hook on it, or use another "
      "\"parallel.schedule\", such as \"1f1b\""));
}

}  // namespace

// The nodes of a stage's graph, and the groups of leaves that share boundary nodes.
struct SplitBackward::Graph {
  struct Boundary {
    device::NodePtr node;
    std::vector<size_t> leaves;
    std::shared_ptr<KeptGradients> kept = std::make_shared<KeptGradients>();
  };
  struct LeafGroup {
    std::vector<size_t> leaves, boundaries;
    GraphPlace at;       // at which a plain backward would reach the leaves
    bool early = false;  // the first part computes the gradients, and the second one adds them
    Tensors gradients;   // of the leaves, if `early`
  };

  Graph(const Tensors& outputs, const Tensors& gradients, const Tensors& inputs) {
    std::vector<Edge> roots;
    for (const at::Tensor& one : outputs) {
      roots.push_back(torch::autograd::impl::gradient_edge(one));
    }
    visit(roots, inputs);
    for (const device::NodePtr& node : order) {
      if (!on_path.contains(node.get())) continue;
      std::vector<size_t> reached;
      for (const Edge& edge : node->next_edges()) {
        if (edge.is_valid() && !on_path.contains(edge.function.get())) {
          unite(&reached, leaves_of.at(edge.function.get()));
        }
      }
      if (!reached.empty()) boundaries.push_back({node, reached});
    }
    // An output off the path gives its gradient to the second part directly.
    for (size_t i = 0; i < roots.size(); ++i) {
      Node* const node = roots[i].function.get();
      if (on_path.contains(node) || leaves_of.at(node).empty()) continue;
      boundaries.push_back({roots[i].function, leaves_of.at(node)});
      KeptGradients& kept = *boundaries.back().kept;
      kept.gradients.resize(roots[i].input_nr + 1);
      kept.gradients.back() = gradients[i];
      kept.versions.assign(kept.gradients.size(), gradients[i]._version());
    }
    group();
  }

  // Puts all nodes into `order`, each after the nodes to which its edges lead. Fills `on_path`, and
  // `leaves_of` for the other nodes.
  void visit(const std::vector<Edge>& roots, const Tensors& inputs) {
    std::unordered_set<const Node*> ends, seen;
    for (const at::Tensor& input : inputs) {
      ends.insert(torch::autograd::impl::gradient_edge(input).function.get());
    }
    std::vector<std::pair<device::NodePtr, size_t>> stack;  // node, next edge
    const auto push = [&](const device::NodePtr& node) {
      if (node && seen.insert(node.get()).second) stack.emplace_back(node, 0);
    };
    for (const Edge& root : roots) {
      push(root.function);
      while (!stack.empty()) {
        const device::NodePtr node = stack.back().first;
        if (stack.back().second < node->num_outputs()) {
          push(node->next_edge(stack.back().second++).function);
          continue;
        }
        stack.pop_back();
        order.push_back(node);
        note(*node, ends);
      }
    }
  }

  void note(Node& node, const std::unordered_set<const Node*>& ends) {
    std::vector<size_t>& reached = leaves_of[&node];
    if (ends.contains(&node)) {
      on_path.insert(&node);
      return;
    }
    if (const auto* leaf = dynamic_cast<AccumulateGrad*>(&node)) {
      reached = {leaves.size()};
      leaves.push_back(leaf->variable);
      return;
    }
    for (const Edge& edge : node.next_edges()) {
      if (!edge.is_valid()) continue;
      if (on_path.contains(edge.function.get())) on_path.insert(&node);
      unite(&reached, leaves_of.at(edge.function.get()));
    }
    if (on_path.contains(&node)) reached.clear();
  }

  // Two leaves with a common boundary node are in one group.
  void group() {
    std::vector<size_t> parent(leaves.size());
    std::iota(parent.begin(), parent.end(), 0);
    const auto root_of = [&](size_t leaf) {
      while (parent[leaf] != leaf) leaf = parent[leaf] = parent[parent[leaf]];
      return leaf;
    };
    for (const Boundary& one : boundaries) {
      for (const size_t leaf : one.leaves) parent[root_of(leaf)] = root_of(one.leaves.front());
    }
    std::map<size_t, LeafGroup> found;
    for (size_t i = 0; i < boundaries.size(); ++i) {
      LeafGroup& group = found[root_of(boundaries[i].leaves.front())];
      group.boundaries.push_back(i);
      const GraphPlace at = place_of(*boundaries[i].node);
      if (group.boundaries.size() == 1 || at.number < group.at.number) group.at = at;
    }
    for (auto& [root, group] : found) {
      for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
        if (root_of(leaf) == root) group.leaves.push_back(leaf);
      }
      group.early =
          repeats(group) || !std::all_of(group.boundaries.begin(), group.boundaries.end(),
                                         [&](size_t i) { return runs_twice(*boundaries[i].node); });
      groups.push_back(std::move(group));
    }
    std::sort(groups.begin(), groups.end(), [](const LeafGroup& left, const LeafGroup& right) {
      return left.at.number > right.at.number;
    });
  }

  // Returns whether a path leads from one boundary node of the group to another one.
  bool repeats(const LeafGroup& group) const {
    if (group.boundaries.size() < 2) return false;
    std::unordered_set<const Node*> ends, seen;
    std::vector<const Node*> open;
    for (const size_t i : group.boundaries) {
      if (!ends.insert(boundaries[i].node.get()).second) return true;
      open.push_back(boundaries[i].node.get());
    }
    while (!open.empty()) {
      const Node* const node = open.back();
      open.pop_back();
      for (const Edge& edge : node->next_edges()) {
        const Node* const next = edge.function.get();
        if (ends.contains(next)) return true;
        if (next != nullptr && seen.insert(next).second) open.push_back(next);
      }
    }
    return false;
  }

  static void unite(std::vector<size_t>* to, const std::vector<size_t>& more) {
    std::vector<size_t> all;
    std::set_union(to->begin(), to->end(), more.begin(), more.end(), std::back_inserter(all));
    *to = std::move(all);
  }

  // Accumulates the group's gradients into its leaves.
  void add(LeafGroup& group, const Tensors& leaves) {
    for (size_t i = 0; i < group.gradients.size(); ++i) {
      at::Tensor gradient = std::move(group.gradients[i]);
      if (gradient.defined()) torch::autograd::backward({leaves[i]}, {std::move(gradient)});
    }
    if (group.early) return;
    std::vector<Edge> edges;
    variable_list gradients;
    for (const size_t i : group.boundaries) {
      KeptGradients& kept = *boundaries[i].kept;
      for (size_t input = 0; input < kept.gradients.size(); ++input) {
        at::Tensor& gradient = kept.gradients[input];
        if (!gradient.defined()) continue;
        if (gradient._version() != kept.versions[input]) {
          throw RuntimeFault(
              concat("[engine::split_backward] a backward changed a gradient in place (after ",
                     boundaries[i].node->name(),
                     "), but the gradients of weights still need it. Use "
                     "another \"parallel.schedule\", such as \"1f1b\""));
        }
        edges.emplace_back(boundaries[i].node, static_cast<uint32_t>(input));
        gradients.push_back(std::move(gradient));
      }
    }
    if (!edges.empty()) accumulate(edges, std::move(gradients), leaves);
  }

  Tensors of(const std::vector<size_t>& which) const {
    Tensors tensors;
    for (const size_t leaf : which) tensors.push_back(leaves[leaf]);
    return tensors;
  }

  std::vector<device::NodePtr> order;
  std::unordered_set<const Node*> on_path;
  std::unordered_map<const Node*, std::vector<size_t>> leaves_of;
  Tensors leaves;
  std::vector<Boundary> boundaries;
  std::vector<LeafGroup> groups;  // in the order of the second part
};

namespace {

// The node whose backward is the second part. The backwards of the groups run inside it, so all of
// them are one backward to the engine.
struct WeightsPart final : torch::autograd::Function<WeightsPart> {
  struct SecondPart : torch::CustomClassHolder {
    std::function<void()> run;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<SecondPart>& work) {
    context->saved_data["work"] = c10::IValue::make_capsule(work);
    return at::empty({1});
  }
  static variable_list backward(torch::autograd::AutogradContext* context,
                                const variable_list& /*gradients*/) {
    const auto capsule = context->saved_data["work"].toCapsule();
    static_cast<SecondPart*>(capsule.get())->run();
    return {at::Tensor(), at::Tensor()};
  }
};

void run_as_backward(std::function<void()> run) {
  const at::AutoGradMode enabled(true);
  const auto work = c10::make_intrusive<WeightsPart::SecondPart>();
  work->run = std::move(run);
  const at::Tensor start = WeightsPart::apply(at::empty({1}).requires_grad_(), work);
  torch::autograd::backward({start}, {at::ones({1})});
}

}  // namespace

SplitBackward::SplitBackward(Tensors outputs, Tensors gradients, Tensors inputs)
    : outputs_(std::move(outputs)), gradients_(std::move(gradients)), inputs_(std::move(inputs)) {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (!gradients_[i].defined()) gradients_[i] = at::ones_like(outputs_[i]);
  }
}

SplitBackward::SplitBackward(SplitBackward&& other) noexcept = default;
SplitBackward::~SplitBackward() = default;

void SplitBackward::inputs() {
  if (!splits()) return;
  graph_ = std::make_unique<Graph>(outputs_, gradients_, inputs_);
  Tensors ends = inputs_;
  for (const Graph::LeafGroup& group : graph_->groups) {
    if (group.early) {
      for (const at::Tensor& leaf : graph_->of(group.leaves)) {
        check_hooks(leaf);
        ends.push_back(leaf);
      }
      continue;
    }
    for (const size_t i : group.boundaries) {
      const Graph::Boundary& one = graph_->boundaries[i];
      if (!one.kept->gradients.empty()) continue;  // an output off the path
      one.node->add_pre_hook(std::make_unique<KeepGradients>(one.kept));
    }
  }
  Tensors found = torch::autograd::grad(outputs_, ends, gradients_, /*retain_graph=*/true,
                                        /*create_graph=*/false, /*allow_unused=*/true);
  auto next = found.begin() + static_cast<ptrdiff_t>(inputs_.size());
  for (Graph::LeafGroup& group : graph_->groups) {
    if (!group.early) continue;
    for (size_t i = 0; i < group.leaves.size(); ++i) group.gradients.push_back(std::move(*next++));
  }
  graph_->order.clear();
  graph_->leaves_of.clear();
}

SplitBackward::Tensors SplitBackward::leaves() const { return graph_ ? graph_->leaves : Tensors(); }

void SplitBackward::weights(const WeightEvents& events) {
  if (!graph_) {
    if (!outputs_.empty()) torch::autograd::backward(outputs_, gradients_);
    return;
  }
  run_as_backward([&] {
    events.begin();
    for (Graph::LeafGroup& group : graph_->groups) {
      const Tensors leaves = graph_->of(group.leaves);
      events.enter(leaves, group.at);
      graph_->add(group, leaves);
      events.leave(leaves);
    }
    outputs_.clear();
    graph_.reset();
  });
}

}  // namespace penstock::engine
