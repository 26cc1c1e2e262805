#include "src/engine/step/autograd_hooks.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/library.h>

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

void hook(torch::autograd::Node& node, uint64_t since, const std::function<void()>& before) {
  if (node.sequence_nr() < since) return;
  node.add_pre_hook(std::make_unique<BeforeBackward>(before));
}

thread_local OutsideReads* watching = nullptr;  // dispatch keys are set per thread

void look_at_all(const c10::IValue& value) {
  if (value.isTensor()) {
    watching->look_at(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) watching->look_at(tensor);
  }
}

void look_then_run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::DeferredInit);
  if (watching != nullptr) {
    const size_t num_arguments = op.schema().arguments().size();
    for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) look_at_all((*stack)[i]);
  }
  op.callBoxed(stack);
}

// Registered at the first use, so that a program that never trains with moving parameters can use
// the dispatch key for something else.
void register_fallback() {
  static const auto library = [] {
    auto lib = std::make_unique<torch::Library>(torch::Library::IMPL, "_",
                                                c10::DispatchKey::DeferredInit, __FILE__, __LINE__);
    lib->fallback(torch::CppFunction::makeFromBoxedFunction<&look_then_run>());
    return lib;
  }();
}

}  // namespace

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

uint64_t now() { return at::sequence_number::peek(); }

void before_backward_of(const std::vector<at::Tensor>& outputs, uint64_t since,
                        const std::function<void()>& before) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || !output.grad_fn()) continue;
    hook(*output.grad_fn(), since, before);
    // An in-place edit of a view makes a new node for the view; the node of its base stays.
    if (output.is_view() && output._base().grad_fn()) {
      hook(*output._base().grad_fn(), since, before);
    }
  }
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

OutsideReads::OutsideReads(std::unordered_map<const c10::StorageImpl*, int> unit_of_storage,
                           std::function<void(int)> found)
    : unit_of_storage_(std::move(unit_of_storage)), found_(std::move(found)), outer_(watching) {
  register_fallback();
  watching = this;
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::DeferredInit, true);
}

OutsideReads::~OutsideReads() {
  watching = outer_;
  if (watching == nullptr) {
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::DeferredInit, false);
  }
}

void OutsideReads::look_at(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return;
  c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage->_mutable_data_ptr_no_checks().get() != nullptr) return;
  const auto found = unit_of_storage_.find(storage);
  if (found != unit_of_storage_.end()) found_(found->second);
}

}  // namespace penstock::engine
