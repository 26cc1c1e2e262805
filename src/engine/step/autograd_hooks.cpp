#include "src/engine/step/autograd_hooks.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace penstock::engine {

namespace {

using torch::autograd::variable_list;

class BeforeBackward final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeBackward(std::function<void()> before) : before_(std::move(before)) {}
  variable_list operator()(const variable_list& gradients) override {
    before_();
    return gradients;
  }

 private:
  std::function<void()> before_;
};

void hook(torch::autograd::Node& node, const GraphPlace& since,
          const std::function<void(const GraphPlace&)>& before) {
  if (node.sequence_nr() < since.number) return;
  const GraphPlace place = place_of(node);
  node.add_pre_hook(std::make_unique<BeforeBackward>([before, place] { before(place); }));
}

}  // namespace

GraphPlace place_of(const torch::autograd::Node& node) {
  return {node.thread_id(), node.sequence_nr()};
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// torch.autograd.grad() captures gradients at nodes; backward() captures none.
bool in_side_backward() {
  if (!in_backward()) return false;
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && std::any_of(wanted->begin(), wanted->end(), [](const auto& node) {
           return node.second.captures_ != nullptr;
         });
}

void at_end_of_backward(std::function<void()> done) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(done));
}

GraphPlace now() { return {at::RecordFunction::currentThreadId(), at::sequence_number::peek()}; }

GraphPlace in_graph() {
  const auto node = torch::autograd::get_current_node();
  return node ? place_of(*node) : GraphPlace{};
}

void before_backward_of(const std::vector<at::Tensor>& outputs, const GraphPlace& since,
                        const std::function<void(const GraphPlace&)>& before) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || !output.grad_fn()) continue;
    hook(*output.grad_fn(), since, before);
    // An in-place edit of a view makes a new node for the view; the node of its base stays.
    if (output.is_view() && output._base().grad_fn()) {
      hook(*output._base().grad_fn(), since, before);
    }
  }
}

bool is_unit_hook(const torch::autograd::FunctionPreHook& hook) {
  return dynamic_cast<const BeforeBackward*>(&hook) != nullptr;
}

bool only_looked_up(const std::vector<at::Tensor>& outputs) {
  return std::all_of(outputs.begin(), outputs.end(), [](const at::Tensor& output) {
    if (!output.defined() || !output.requires_grad()) return true;
    const auto& node = output.grad_fn();
    if (!node || node->name() != "EmbeddingBackward0") return false;
    const auto& weight = node->next_edge(0).function;
    return weight && weight->num_outputs() == 0;  // an accumulator: the weight is a leaf
  });
}

GradientHook::GradientHook(const at::Tensor& leaf, std::function<void()> taken)
    : leaf_(leaf), taken_(std::move(taken)) {
  install();
}

GradientHook::~GradientHook() { remove(); }

bool GradientHook::expected() const {
  if (!leaf_.requires_grad() || !accumulator_) return false;
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return true;
  const auto found = wanted->find(accumulator_.get());
  return found != wanted->end() && found->second.needed_ && found->second.captures_ == nullptr;
}

void GradientHook::install() {
  accumulator_ = torch::autograd::impl::grad_accumulator(leaf_);
  if (!accumulator_) return;  // the leaf was frozen in the meantime
  key_ = accumulator_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [taken = taken_](const variable_list& outputs, const variable_list&) {
        taken();
        return outputs;
      }));
}

void GradientHook::remove() {
  if (accumulator_) accumulator_->del_post_hook(key_);
}

void GradientHook::follow() {
  if (!leaf_.requires_grad()) return;
  if (torch::autograd::impl::try_get_grad_accumulator(leaf_) == accumulator_) return;
  remove();
  install();
}

}  // namespace penstock::engine
