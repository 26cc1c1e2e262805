#pragma once
// The state of an Engine of the C++ front, and the engine whose forward runs on this thread.
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "penstock/checkpoint.h"
#include "penstock/engine.h"
#include "src/engine/front/pipeline_runner.h"
#include "src/engine/mesh/tensor_ranks.h"

namespace penstock {

struct Engine::Impl {
  std::shared_ptr<torch::nn::Module> model;
  int rank = 0, world = 1;
  std::optional<Core> core;
  std::unordered_map<const torch::nn::Module*, int> unit_of;
  std::unordered_map<const torch::nn::Module*, TensorModule> cut;  // cut over tensor ranks
  std::optional<engine::PipelineRunner> stages;                    // set if mesh.pipeline > 1

  OptimizerConfig settings() const;  // settings of the next step
  // Returns the model's buffers, and also `generator` (the state of a random generator), which is
  // saved as the tensor of rank `of_rank`.
  std::vector<CheckpointTensor> tensors(const at::Tensor& generator, int of_rank) const;
  // Runs a forward of the model or of one pipeline stage, between the root's begin and end events.
  at::Tensor run(const std::function<at::Tensor()>& forward);
  // [all ranks] Returns the mean of the losses, over the ranks that have losses.
  double mean(const std::vector<at::Tensor>& losses) const;
};

namespace engine {

// The engine whose forward runs on this thread. unit() reads it.
struct Running {
  Core* core = nullptr;
  const std::unordered_map<const torch::nn::Module*, int>* unit_of = nullptr;
  const std::unordered_map<const torch::nn::Module*, TensorModule>* cut = nullptr;
  PipelineRunner* stages = nullptr;
};

}  // namespace engine

}  // namespace penstock
