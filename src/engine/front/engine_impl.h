#pragma once
// What the C++ front knows of the model that runs: the state behind an Engine, and the forward that
// is under way on this thread.
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "penstock/checkpoint.h"
#include "penstock/engine.h"
#include "penstock/tensor_ranks.h"
#include "src/engine/front/pipeline_runner.h"

namespace penstock {

struct Engine::Impl {
  std::shared_ptr<torch::nn::Module> model;
  int rank = 0, world = 1;
  std::optional<Core> core;
  std::unordered_map<const torch::nn::Module*, int> unit_of;
  std::unordered_map<const torch::nn::Module*, TensorModule> cut;  // over tensor ranks
  std::optional<engine::PipelineRunner> stages;                    // where mesh.pipeline > 1

  OptimizerConfig settings() const;
  // Buffers; and with them this rank's generator, or that of `of_rank`.
  std::vector<CheckpointTensor> tensors(const at::Tensor& generator, int of_rank) const;
  // A forward of the model, or of one stage of it.
  at::Tensor run(const std::function<at::Tensor()>& forward);
  double mean(const std::vector<at::Tensor>& losses) const;  // [all ranks] of those that have any
};

namespace engine {

// What `unit()` finds: the engine whose forward runs on this thread.
struct Running {
  Core* core = nullptr;
  const std::unordered_map<const torch::nn::Module*, int>* unit_of = nullptr;
  const std::unordered_map<const torch::nn::Module*, TensorModule>* cut = nullptr;
  PipelineRunner* stages = nullptr;
};

}  // namespace engine

}  // namespace penstock
