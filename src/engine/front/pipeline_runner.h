#pragma once
// PipelineRunner: a pipeline's stages in the C++ front. Each rank runs the model's own forward:
// units of earlier stages are stood in for by tensors of the meta device, which have no values; the
// first unit of the stage is given what has travelled; the first of the next stage ends the
// forward.
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "penstock/pipeline_ranks.h"

namespace penstock::engine {

class PipelineRunner {
 public:
  using Tensors = std::vector<at::Tensor>;
  // A forward of the model, from the engine's begin to its end.
  using Run = std::function<at::Tensor(const std::function<at::Tensor()>&)>;

  PipelineRunner(Core& core, const torch::nn::Module& model);

  // One window: this rank's losses of its last stage, detached; none elsewhere.
  std::vector<at::Tensor> train(int num_micro, const std::function<at::Tensor(int)>& loss_of,
                                const Run& run);
  std::vector<at::Tensor> evaluate(int num_micro, const std::function<at::Tensor(int)>& loss_of,
                                   const Run& run);

  // Whether a stage has that module as its own.
  bool has(const torch::nn::Module& module) const { return stage_of_.contains(&module); }
  // It is called: runs it, or something else (see above).
  at::Tensor call(const torch::nn::Module& module, const Tensors& inputs,
                  const std::function<at::Tensor(const Tensors&)>& forward);
  // Before close() and whatever reads buffers.
  void set_buffers();
  void bring_buffers();

 private:
  struct StageInput;
  struct Arrive;
  // A forward of one stage and one micro-batch, until its backward.
  struct StagePass {
    StageAction action;
    StageMessage given{};
    bool begun = false;
    std::vector<std::pair<at::Tensor, at::Tensor>> values{};  // of stand-ins that have come
    std::vector<c10::intrusive_ptr<StageInput>> arrivals{};
    StageMessage made{};
    at::Tensor loss{};
  };
  std::unique_ptr<StagePass> forward(const StageAction& action,
                                     const std::function<at::Tensor(int)>& loss_of, const Run& run);
  void backward(const StageAction& action, StagePass& pass);
  void take(const std::string& module, const Tensors& inputs);
  Tensors with_values(const std::string& module, const Tensors& inputs) const;

  Core& core_;
  const torch::nn::Module& model_;
  PipelineRanks ranks_;
  std::unordered_map<const torch::nn::Module*, StagePiece> stage_of_;
  StagePass* pass_ = nullptr;  // the one that runs
};

}  // namespace penstock::engine
