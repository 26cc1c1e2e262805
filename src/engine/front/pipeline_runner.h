#pragma once
// PipelineRunner: runs a pipeline's stages in the C++ front. Used only by the model's thread.
//
// [Note: A stage's forward] Each rank runs the model's own forward for each of its stages. A unit
// of an earlier stage returns a stand-in, a tensor of the meta device without values. When the
// stage's first unit is called, the stand-ins in its inputs are replaced by the values that the
// previous stage sent. When the first unit of the next stage is called, its inputs are sent to the
// next stage, and an exception ends the forward.
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/engine/mesh/pipeline_ranks.h"

namespace penstock::engine {

class PipelineRunner {
 public:
  using Tensors = std::vector<at::Tensor>;
  // Runs a forward between the root's begin and end events (Engine::Impl::run()).
  using Run = std::function<at::Tensor(const std::function<at::Tensor()>&)>;

  PipelineRunner(Core& core, const torch::nn::Module& model);

  // Both methods run one accumulation window of `num_micro` micro-batches. On the rank with the
  // last stage, they return the losses (detached in train()). On other ranks they return
  // an empty list.
  std::vector<at::Tensor> train(int num_micro, const std::function<at::Tensor(int)>& loss_of,
                                const Run& run);
  std::vector<at::Tensor> evaluate(int num_micro, const std::function<at::Tensor(int)>& loss_of,
                                   const Run& run);

  // Returns whether the module belongs to one stage.
  bool has(const torch::nn::Module& module) const { return stage_of_.contains(&module); }
  // Handles a call of a module that belongs to one stage ([Note: A stage's forward]).
  at::Tensor call(const torch::nn::Module& module, const Tensors& inputs,
                  const std::function<at::Tensor(const Tensors&)>& forward);
  // Gives PipelineRanks the buffers that each stage owns. Must be called before close().
  void set_buffers();
  // [all ranks] Copies each stage's buffers to the other ranks. Must be called before a save.
  void bring_buffers();

 private:
  struct StageInput;
  struct Arrive;
  // One stage's forward of one micro-batch. It is kept until its backward.
  struct StagePass {
    Action action;
    StageMessage given{};  // received from the previous stage
    bool begun = false;    // the first unit of the stage was called
    std::vector<std::pair<at::Tensor, at::Tensor>> values{};  // stand-in, received value
    std::vector<c10::intrusive_ptr<StageInput>> arrivals{};
    StageMessage made{};  // sent to the next stage
    at::Tensor loss{};
  };
  std::unique_ptr<StagePass> forward(const Action& action,
                                     const std::function<at::Tensor(int)>& loss_of, const Run& run);
  void backward(const Action& action, StagePass& pass);
  // Starts the backward of all gradients or of the inputs, and sends the inputs' gradients.
  void backward_from(const Action& action, StagePass& pass);
  void run_backward(const std::function<void()>& work);
  void take(const std::string& module, const Tensors& inputs);
  Tensors with_values(const std::string& module, const Tensors& inputs) const;

  Core& core_;
  const torch::nn::Module& model_;
  PipelineRanks ranks_;
  std::unordered_map<const torch::nn::Module*, StagePiece> stage_of_;
  StagePass* pass_ = nullptr;  // the forward that is running
};

}  // namespace penstock::engine
