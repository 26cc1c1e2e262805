#include "src/engine/front/pipeline_runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <map>
#include <set>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

constexpr const char* kPassOn =
    "pass it as an input to the first unit of each later stage, or move the stage boundaries "
    "(\"parallel.stages\")";

// Thrown when a unit of the next stage is called, to leave the model's forward. It is not a
// std::exception: if the model's code catches errors, it must not catch this one.
struct StageEnd {
  std::string module;
  std::vector<at::Tensor> inputs;
};

at::Tensor stand_in() { return at::empty({0}, at::TensorOptions(at::kMeta)); }

}  // namespace

// A received tensor that needs a gradient. The gradient is sent back to the previous stage.
struct PipelineRunner::StageInput final : torch::CustomClassHolder {
  at::Tensor value, gradient;
  at::Tensor anchor = at::empty({0}).requires_grad_();  // the leaf at which the graph ends
};

// The first node of a stage's graph. Its output is neither a leaf nor a view, so the model may
// change it in place. The backward stores the gradient in the StageInput.
struct PipelineRunner::Arrive final : torch::autograd::Function<Arrive> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<StageInput>& arrival) {
    context->saved_data["arrival"] = c10::IValue::make_capsule(arrival);
    return std::exchange(arrival->value, {});
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto capsule = context->saved_data["arrival"].toCapsule();
    static_cast<StageInput*>(capsule.get())->gradient = gradients.front();
    return {at::Tensor(), at::Tensor()};
  }
};

PipelineRunner::PipelineRunner(Core& core, const torch::nn::Module& model)
    : core_(core), model_(model), ranks_(core) {
  std::map<std::string, StagePiece> pieces;
  for (const StagePiece& piece : ranks_.pieces()) pieces[piece.module] = piece;
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    const auto found = pieces.find(item.key());
    if (found != pieces.end()) stage_of_[item.value().get()] = found->second;
  }
}

std::vector<at::Tensor> PipelineRunner::train(int num_micro,
                                              const std::function<at::Tensor(int)>& loss_of,
                                              const Run& run) {
  std::map<std::pair<int, int>, std::unique_ptr<StagePass>> under_way;
  std::vector<at::Tensor> losses;
  for (const Action& action : ranks_.begin(num_micro, true)) {
    std::unique_ptr<StagePass>& pass = under_way[{action.stage, action.micro}];
    if (action.forward) {
      pass = forward(action, loss_of, run);
      continue;
    }
    backward(action, *pass);
    if (!action.is_last()) continue;
    if (pass->loss.defined()) losses.push_back(pass->loss.detach());
    pass.reset();
  }
  ranks_.end();
  return losses;
}

std::vector<at::Tensor> PipelineRunner::evaluate(int num_micro,
                                                 const std::function<at::Tensor(int)>& loss_of,
                                                 const Run& run) {
  std::vector<at::Tensor> losses;
  for (const Action& action : ranks_.begin(num_micro, false)) {
    const std::unique_ptr<StagePass> pass = forward(action, loss_of, run);
    if (pass->loss.defined()) losses.push_back(pass->loss);
  }
  ranks_.end();
  return losses;
}

std::unique_ptr<PipelineRunner::StagePass> PipelineRunner::forward(
    const Action& action, const std::function<at::Tensor(int)>& loss_of, const Run& run) {
  ranks_.start(action);
  auto pass = std::make_unique<StagePass>(StagePass{.action = action, .begun = action.stage == 0});
  if (action.stage > 0) pass->given = ranks_.receive(action);
  pass_ = pass.get();
  bool ended = false;
  const auto until_its_end = [&]() -> at::Tensor {
    try {
      return loss_of(action.micro);
    } catch (StageEnd& end) {
      ended = true;
      pass->made.text = end.module + "\n";
      for (const at::Tensor& one : end.inputs) pass->made.text += one.requires_grad() ? '1' : '0';
      pass->made.tensors = std::move(end.inputs);
      return pass->made.tensors.empty() ? at::Tensor() : pass->made.tensors.front();
    }
  };
  try {
    const at::Tensor output = run(until_its_end);
    pass_ = nullptr;
    if (!ended) pass->loss = output;
  } catch (...) {
    pass_ = nullptr;
    throw;
  }
  // The forward must have called the stage's first unit and, except in the last stage, must have
  // ended at a unit of the next stage.
  const bool is_last = action.stage + 1 == ranks_.num_stages();
  if (ended == is_last || !pass->begun) {
    throw RuntimeFault(concat("[front::train_batch] the model's forward ended in stage ",
                              action.stage, " of ", ranks_.num_stages(),
                              " without calling a unit of the next stage"));
  }
  if (is_last && (pass->loss.numel() != 1 || pass->loss.is_meta())) {
    throw RuntimeFault("[front::train_batch] loss_of() must return a loss of one element");
  }
  if (!is_last) {
    StageMessage message{pass->made.text, {}};
    for (const at::Tensor& one : pass->made.tensors) message.tensors.push_back(one.detach());
    ranks_.send(action, message);
  }
  return pass;
}

void PipelineRunner::backward(const Action& action, StagePass& pass) {
  ranks_.start(action);
  if (action.part != BackwardPart::kWeights) {
    backward_from(action, pass);
  } else {
    core_.resume_backward();
    pass.made.tensors.clear();
    if (pass.loss.defined()) pass.loss = pass.loss.detach();
    run_backward([&] { ranks_.backward_weights(action); });
  }
  if (action.is_last()) ranks_.end_backward(action);
}

void PipelineRunner::backward_from(const Action& action, StagePass& pass) {
  PipelineRanks::StageGraph graph;
  if (pass.loss.defined()) {
    graph.outputs = {pass.loss};
    graph.gradients = {core_.start_backward(pass.loss)};
  } else {
    const StageMessage given = ranks_.receive(action);
    for (size_t i = 0; i < given.tensors.size(); ++i) {
      const at::Tensor& output = pass.made.tensors.at(i);
      if (!output.requires_grad() || !given.tensors[i].defined()) continue;
      graph.outputs.push_back(output);
      graph.gradients.push_back(given.tensors[i]);
    }
    core_.resume_backward();
  }
  // If no output needs a gradient, the stage has no graph. It still counts the backward and sends
  // an answer.
  run_backward([&] {
    if (action.part == BackwardPart::kAll) {
      if (!graph.outputs.empty()) torch::autograd::backward(graph.outputs, graph.gradients);
      return;
    }
    for (const auto& one : pass.arrivals) {
      if (one) graph.inputs.push_back(one->anchor);
    }
    ranks_.backward_inputs(action, std::move(graph));
  });
  if (action.stage == 0) return;
  StageMessage back;
  for (const auto& one : pass.arrivals) back.tensors.push_back(one ? one->gradient : at::Tensor());
  ranks_.send(action, back);
}

void PipelineRunner::run_backward(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    core_.backward_failed(error.what());
    throw;
  }
}

at::Tensor PipelineRunner::call(const torch::nn::Module& module, const Tensors& inputs,
                                const std::function<at::Tensor(const Tensors&)>& forward) {
  const StagePiece& piece = stage_of_.at(&module);
  if (pass_ == nullptr) {
    throw RuntimeFault(concat("[front::unit] this rank has a part of the model (mesh.pipeline), ",
                              "and \"", piece.module, "\" belongs to stage ", piece.stage,
                              ". Call Engine::train_batch() or eval_batch()"));
  }
  const int stage = pass_->action.stage;
  if (piece.stage < stage) {
    if (!pass_->begun) return stand_in();
    throw RuntimeFault(concat("[front::train_batch] \"", piece.module, "\" of stage ", piece.stage,
                              " is called after stage ", stage,
                              " has begun, but stages must run in order. Move the stage boundaries "
                              "(\"parallel.stages\")"));
  }
  if (piece.stage > stage) throw StageEnd{piece.module, with_values(piece.module, inputs)};
  if (!pass_->begun) take(piece.module, inputs);
  pass_->begun = true;
  return forward(with_values(piece.module, inputs));
}

// Called by the first unit of this stage. The unit's inputs get the values that the previous stage
// sent.
void PipelineRunner::take(const std::string& module, const Tensors& inputs) {
  const std::string& text = pass_->given.text;
  const std::string told = text.substr(0, text.find('\n'));
  const std::string trains = text.substr(told.size() + 1);
  if (told != module || trains.size() != inputs.size()) {
    throw RuntimeFault(concat(
        "[front::train_batch] stage ", pass_->action.stage, " begins with \"", module,
        "\", called with ", inputs.size(), " inputs, but the previous stage ended at \"", told,
        "\" with ", trains.size(), " inputs. Give all ranks of a pipeline the same batch"));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    pass_->arrivals.emplace_back();
    if (!inputs[i].is_meta()) continue;  // this rank computed it from the batch
    at::Tensor value = pass_->given.tensors.at(i);
    if (trains[i] == '1' && at::GradMode::is_enabled()) {
      const auto arrival = c10::make_intrusive<StageInput>();
      arrival->value = value;
      value = Arrive::apply(arrival->anchor, arrival);
      pass_->arrivals.back() = arrival;
    }
    pass_->values.emplace_back(inputs[i], value);
  }
}

PipelineRunner::Tensors PipelineRunner::with_values(const std::string& module,
                                                    const Tensors& inputs) const {
  Tensors all;
  for (const at::Tensor& input : inputs) {
    all.push_back(input);
    for (const auto& [absent, value] : pass_->values) {
      if (absent.is_same(input)) all.back() = value;
    }
    if (all.back().defined() && !all.back().is_meta()) continue;
    throw RuntimeFault(concat("[front::train_batch] \"", module, "\" is called in stage ",
                              pass_->action.stage,
                              " with a tensor that only an earlier stage has: ", kPassOn));
  }
  return all;
}

void PipelineRunner::set_buffers() {
  std::vector<StageBuffer> buffers;
  std::set<const at::TensorImpl*> seen;
  for (const StagePiece& piece : ranks_.pieces()) {
    for (const auto& item : model_.named_modules("", /*include_self=*/true)) {
      const bool inside = item.key() == piece.module || item.key().starts_with(piece.module + ".");
      if (!inside) continue;
      for (const auto& one : item.value()->named_buffers(/*recurse=*/false)) {
        if (!seen.insert(one.value().unsafeGetTensorImpl()).second) continue;
        buffers.push_back({concat(item.key(), ".", one.key()), piece.stage, one.value()});
      }
    }
  }
  ranks_.set_buffers(std::move(buffers));
}

void PipelineRunner::bring_buffers() {
  set_buffers();
  ranks_.bring_buffers();
}

}  // namespace penstock::engine
