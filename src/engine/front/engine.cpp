// The C++ front: turns calls of torch::nn modules into events of the Core.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "penstock/report.h"
#include "src/base/text.h"
#include "src/engine/front/config_keys.h"
#include "src/engine/front/engine_impl.h"
#include "src/engine/model/values.h"
#include "src/plan/strategy.h"

namespace penstock {

OptimizerConfig Engine::Impl::settings() const {
  const Config& config = core->config();
  OptimizerConfig group = config.optimizer.value_or(OptimizerConfig{});
  group.lr *= lr_factor(config.schedule, core->steps() + 1);
  return group;
}

std::vector<CheckpointTensor> Engine::Impl::tensors(const at::Tensor& generator,
                                                    int of_rank) const {
  std::vector<CheckpointTensor> all;
  for (const auto& buffer : model->named_buffers()) {
    all.push_back({"buffer", buffer.key(), buffer.value().sizes().vec(), 0,
                   CheckpointTensor::kIfDifferent, buffer.value()});
  }
  all.push_back({"rng", "torch", generator.sizes().vec(), 0, of_rank, generator});
  return all;
}

namespace {

thread_local engine::Running running;

// Sets all modules to eval mode; the destructor restores each module's mode.
class InEval {
 public:
  explicit InEval(torch::nn::Module& model) {
    for (const auto& one : model.modules()) trained_.emplace_back(one, one->is_training());
    model.eval();
  }
  ~InEval() {
    for (const auto& [module, training] : trained_) set(*module, training);
  }
  InEval(const InEval&) = delete;
  InEval& operator=(const InEval&) = delete;

 private:
  // train() also changes the modules inside. So modules are restored from the outermost to the
  // innermost: the mode of each module is set after the modes of all modules around it.
  static void set(torch::nn::Module& module, bool training) {
    if (module.is_training() != training) module.train(training);
  }
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> trained_;
};

// "penstock::BlockImpl" -> "Block"
std::string class_name(const torch::nn::Module& module) {
  std::string name = module.name();
  name = name.substr(name.rfind(':') + 1);
  if (name.size() > 4 && name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

template <class... Kinds>
bool is_any(const torch::nn::Module& module) {
  return ((typeid(module) == typeid(Kinds)) || ...);
}

// Subclasses are left out, because their forward may compute in other dtypes.
bool keeps_statistics(const torch::nn::Module& module) {
  return is_any<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl,
                torch::nn::InstanceNorm1dImpl, torch::nn::InstanceNorm2dImpl,
                torch::nn::InstanceNorm3dImpl>(module);
}

ModelTree tree_of(const torch::nn::Module& model) {
  ModelTree tree;
  std::map<const at::TensorImpl*, int> index_of;
  for (const auto& item : model.named_parameters()) {
    // Tied parameters appear once, under their first name.
    const auto [at, added] =
        index_of.emplace(item.value().unsafeGetTensorImpl(), static_cast<int>(tree.params.size()));
    if (added) tree.params.push_back({item.key(), item.value(), 0});
  }
  std::map<std::string, int> module_of;
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    const size_t dot = item.key().rfind('.');
    ModuleInfo info;
    info.name = item.key();
    info.type = class_name(*item.value());
    const bool root = tree.modules.empty();
    info.parent = root ? -1 : module_of[dot == std::string::npos ? "" : item.key().substr(0, dot)];
    for (const auto& param : item.value()->named_parameters(/*recurse=*/false)) {
      info.params.push_back(index_of.at(param.value().unsafeGetTensorImpl()));
    }
    info.keeps = !item.value()->named_buffers(/*recurse=*/false).is_empty();
    module_of[info.name] = static_cast<int>(tree.modules.size());
    tree.modules.push_back(info);
  }
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    const auto params = item.value()->named_parameters(/*recurse=*/false);
    // Running statistics must have the dtype of their module's weight.
    const bool follows = keeps_statistics(*item.value()) && params.contains("weight");
    const int weight = follows ? index_of.at(params["weight"].unsafeGetTensorImpl()) : -1;
    for (const auto& buffer : item.value()->named_buffers(/*recurse=*/false)) {
      const std::string prefix = item.key().empty() ? "" : item.key() + ".";
      tree.buffers.push_back({prefix + buffer.key(), buffer.value(), weight});
    }
  }
  return tree;
}

}  // namespace

Engine::Engine(const std::shared_ptr<torch::nn::Module>& model, const Config& config,
               std::shared_ptr<Group> group)
    : state_(std::make_unique<Impl>()) {
  engine::refuse_unread_keys(config);  // before the model is changed
  state_->model = model;
  state_->rank = group->rank();
  state_->world = group->size();
  state_->core.emplace(tree_of(*model), config, std::move(group));
  const std::vector<UnitInfo> units = state_->core->units();
  if (state_->core->config().mesh.pipeline > 1) state_->stages.emplace(*state_->core, *model);
  std::map<std::string, TensorModule> cut;
  if (state_->core->config().mesh.tensor > 1) {
    for (const TensorModule& one : TensorRanks(*state_->core).modules()) cut[one.name] = one;
  }
  for (const auto& item : model->named_modules("", /*include_self=*/true)) {
    const auto how = cut.find(item.key());
    if (how != cut.end()) state_->cut[item.value().get()] = how->second;
    for (size_t unit = 1; unit < units.size(); ++unit) {
      if (units[unit].module == item.key())
        state_->unit_of[item.value().get()] = static_cast<int>(unit);
    }
  }
}

Engine::~Engine() = default;

// Restores `running` at the end, because a forward may call the forward of another engine's model.
at::Tensor Engine::Impl::run(const std::function<at::Tensor()>& forward) {
  core->unit_begin(0, at::GradMode::is_enabled());
  const engine::Running outer =
      std::exchange(running, {&*core, &unit_of, &cut, stages ? &*stages : nullptr});
  at::Tensor output;
  try {
    output = forward();
  } catch (const std::exception& error) {
    running = outer;
    core->forward_failed(error.what());
    throw;
  }
  running = outer;
  core->unit_end(0, {output});
  return output;
}

at::Tensor Engine::run(const std::function<at::Tensor()>& forward) {
  if (!state_->stages) return state_->run(forward);
  throw RuntimeFault(
      "[front::run] this rank has only a part of the model (mesh.pipeline): call train_batch() or "
      "eval_batch(), which run all stages");
}

double Engine::train_batch(const std::function<at::Tensor(int)>& loss_of) {
  Impl& state = *state_;
  const auto count = static_cast<int>(state.core->config().batch.accumulate);
  std::vector<at::Tensor> losses;
  if (state.stages) {
    losses = state.stages->train(count, loss_of,
                                 [&state](const auto& forward) { return state.run(forward); });
    step();
    return state.mean(losses);
  }
  for (int micro = 0; micro < count; ++micro) {
    const at::Tensor loss = state.run([&] { return loss_of(micro); });
    backward(loss);
    losses.push_back(loss.detach());
    if (step() && micro + 1 < count) {
      throw RuntimeFault(
          "[front::train_batch] backwards had already run since the last step, so the window "
          "ended inside this batch. Call step(true) before train_batch()");
    }
  }
  return state.mean(losses);
}

double Engine::eval_batch(const std::function<at::Tensor(int)>& loss_of) {
  const at::NoGradGuard no_gradients;
  Impl& state = *state_;
  const InEval in_eval(*state.model);
  const auto count = static_cast<int>(state.core->config().batch.accumulate);
  std::vector<at::Tensor> losses;
  if (state.stages) {
    losses = state.stages->evaluate(count, loss_of,
                                    [&state](const auto& forward) { return state.run(forward); });
  } else {
    for (int micro = 0; micro < count; ++micro) {
      losses.push_back(state.run([&] { return loss_of(micro); }));
    }
  }
  return state.mean(losses);
}

// In a pipeline only ranks with the last stage have losses, so only these ranks count.
double Engine::Impl::mean(const std::vector<at::Tensor>& losses) const {
  double sum = 0.0;
  for (const at::Tensor& one : losses) sum += one.item<double>();
  const auto count = static_cast<double>(std::max<size_t>(1, losses.size()));
  return core->mean(sum / count, !losses.empty());
}

int Engine::data_rank() const {
  return penstock::data_rank(state_->core->config().mesh, state_->rank);
}

int Engine::data_size() const { return state_->core->config().mesh.data; }

at::Tensor unit(const torch::nn::Module& module, const std::function<at::Tensor()>& forward) {
  if (running.core == nullptr) return forward();
  if (running.stages != nullptr && running.stages->has(module)) {
    throw RuntimeFault(concat("[front::unit] a ", module.name(),
                              " belongs to one pipeline stage, so its inputs may come from another "
                              "rank: pass its inputs to unit() as well"));
  }
  const auto found = running.unit_of->find(&module);
  if (found == running.unit_of->end()) return forward();
  running.core->unit_begin(found->second, at::GradMode::is_enabled());
  at::Tensor output = forward();
  running.core->unit_end(found->second, {output});
  return output;
}

at::Tensor unit(const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                const std::function<at::Tensor(const std::vector<at::Tensor>&)>& forward) {
  if (running.stages == nullptr || !running.stages->has(module)) {
    return unit(module, [&] { return forward(inputs); });
  }
  return running.stages->call(module, inputs, [&](const std::vector<at::Tensor>& values) {
    const auto found = running.unit_of->find(&module);
    if (found == running.unit_of->end()) return forward(values);
    running.core->unit_begin(found->second, at::GradMode::is_enabled());
    at::Tensor output = forward(values);
    running.core->unit_end(found->second, {output});
    return output;
  });
}

namespace {

// Returns how tensor ranks cut the layer, or null if it is not cut.
const TensorModule* cut_of(const torch::nn::Module& layer) {
  if (running.core == nullptr) return nullptr;
  const auto found = running.cut->find(&layer);
  return found == running.cut->end() ? nullptr : &found->second;
}

}  // namespace

at::Tensor linear(const torch::nn::LinearImpl& layer, const at::Tensor& input) {
  std::optional<at::Tensor> bias;
  if (layer.bias.defined()) bias = layer.bias;
  const TensorModule* how = cut_of(layer);
  if (how == nullptr) return at::linear(input, layer.weight, bias);
  return TensorRanks(*running.core).linear(*how, input, layer.weight, bias);
}

at::Tensor embedding(const torch::nn::EmbeddingImpl& layer, const at::Tensor& ids) {
  const int64_t padding = layer.options.padding_idx().value_or(-1);
  const TensorModule* how = cut_of(layer);
  if (how == nullptr) return at::embedding(layer.weight, ids, padding);
  return TensorRanks(*running.core).embedding(*how, ids, layer.weight, padding);
}

void Engine::backward(const at::Tensor& loss) { loss.backward(state_->core->start_backward(loss)); }

bool Engine::step(bool force) {
  if (!state_->core->window_complete(force)) return false;
  return state_->core->step({state_->settings()});
}

double Engine::grad_norm() const { return Report(*state_->core).grad_norm(); }
double Engine::lr() const { return state_->settings().lr; }
LedgerReport Engine::ledger() const { return Report(*state_->core).ledger(); }
Metrics Engine::metrics() const { return Metrics(*state_->core); }
std::string Engine::explain() const { return Report(*state_->core).explain(); }
std::vector<std::pair<std::string, at::Tensor>> Engine::state() {
  return Values(*state_->core).full("param");
}
std::string Engine::save(const std::string& path, const std::string& tag,
                         const std::string& client_state, bool wait) {
  const at::Tensor generator = at::detail::getDefaultCPUGenerator().get_state();
  if (state_->stages) state_->stages->bring_buffers();
  return Checkpoints(*state_->core)
      .save(path, {.tag = tag,
                   .wait = wait,
                   .front = concat("{\"client_state\":", client_state, "}"),
                   .tensors = state_->tensors(generator, state_->rank),
                   .starting = {},
                   .problem = {}});
}

std::string Engine::load(const std::string& path, const std::string& tag) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = generator.get_state();
  const FoundCheckpoint found =
      Checkpoints(*state_->core).load(path, {.tag = tag, .tensors = [&](const auto& one) {
                                               const int rank =
                                                   std::min(state_->rank, one.world - 1);
                                               return state_->tensors(state, rank);
                                             }});
  if (state_->rank < found.world) generator.set_state(state);
  return found.client_state();
}

void Engine::close(bool gather) {
  if (state_->stages) state_->stages->set_buffers();
  state_->core->close(gather);
}

}  // namespace penstock
