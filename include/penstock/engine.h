#pragma once
// Engine: the C++ front. Trains a torch::nn::Module without Python.
//
//   penstock::Engine engine(model, penstock::Config::parse(json_text), group);
//   auto loss = engine.run([&] { return model->forward(x, y); });
//   engine.backward(loss);
//   engine.step();
//
// torch::nn modules have no forward hooks. So if the parameters of a module should move as one
// unit, the module wraps its forward in penstock::unit(). Without that call the whole model is one
// unit; the results are the same. A large layer is wrapped where it is used: penstock::unit(*embed,
// [&] { return embed(x); }).
//
//   at::Tensor forward(at::Tensor x) {
//     return penstock::unit(*this, [&] { return x + mlp(norm(x)); });
//   }
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "penstock/core.h"
#include "penstock/export.h"
#include "penstock/group.h"
#include "penstock/metrics.h"
#include "penstock/report.h"

namespace torch::nn {
class EmbeddingImpl;
class LinearImpl;
class Module;
}  // namespace torch::nn

namespace penstock {

// Each model has one engine per rank. All calls come from the rank's thread. Methods marked [all
// ranks] are collective. Methods throw the errors of penstock/error.h.
class PENSTOCK_API Engine {
 public:
  // [all ranks] The optimizer and its schedule come from the config. Units are the modules whose
  // class is in `config.units.modules` (default: the repeated blocks) and the large layers outside
  // them.
  Engine(const std::shared_ptr<torch::nn::Module>& model, const Config& config,
         std::shared_ptr<Group> group = Group::alone());
  ~Engine();

  // [all ranks] Runs a forward and returns its result.
  at::Tensor run(const std::function<at::Tensor()>& forward);
  // May be called several times before step(); gradients add up.
  void backward(const at::Tensor& loss);
  // [all ranks] Returns true if the weights changed (see Config::batch.accumulate). `force` ends
  // the accumulation window early.
  bool step(bool force = false);

  // [all ranks] Runs forwards, backwards and the step of one accumulation window. loss_of(i)
  // returns the loss of micro-batch i of `batch.accumulate`, computed on the samples of
  // data_rank(). Works on every mesh, and is the only way to train a pipeline. In a pipeline,
  // loss_of() runs the model's forward through units with explicit inputs (the second unit()
  // below). Returns the mean loss over all micro-batches and data ranks.
  double train_batch(const std::function<at::Tensor(int)>& loss_of);
  // [all ranks] Returns the mean loss without computing gradients, in eval mode.
  double eval_batch(const std::function<at::Tensor(int)>& loss_of);
  // The index of this rank's data rank, and the number of data ranks. Ranks that compute one model
  // together form one data rank.
  int data_rank() const;
  int data_size() const;

  double grad_norm() const;  // of the averaged gradient in the last applied step, before clipping
  double lr() const;         // of the next step
  LedgerReport ledger() const;
  // Metrics of the last step, and timelines. Metrics::count() counts samples and tokens.
  Metrics metrics() const;
  std::string explain() const;
  // [all ranks] Returns the full weights in fp32, by name.
  std::vector<std::pair<std::string, at::Tensor>> state();
  // [all ranks] Saves weights, optimizer state, buffers and torch's generator below `path`
  // (penstock/checkpoint.h). Call it between step() and the next backward. `client_state` is JSON
  // that load() returns. Without `wait`, training continues while the files are written. Returns
  // the checkpoint's path.
  std::string save(const std::string& path, const std::string& tag = "",
                   const std::string& client_state = "null", bool wait = true);
  // [all ranks] Loads the newest complete checkpoint, or the one with the tag. Any layout can be
  // loaded, including checkpoints saved from Python. Returns the client_state of the checkpoint.
  std::string load(const std::string& path, const std::string& tag = "");
  // [all ranks] Turns the model's parameters back into ordinary full tensors. Without `gather`,
  // sharded parameters have no values afterwards, and no peer is needed. Models larger than memory
  // must be closed this way.
  void close(bool gather = true);

 private:
  struct Impl;
  std::unique_ptr<Impl> state_;
};

// Runs `forward` as the unit `module` of the engine whose run() is on this thread's stack. Outside
// run() it only calls `forward`.
PENSTOCK_API at::Tensor unit(const torch::nn::Module& module,
                             const std::function<at::Tensor()>& forward);

// The same for a unit with explicit inputs, which pipeline stages need ("mesh.pipeline").
// `forward(inputs)` runs on the ranks that have the module's stage. On other ranks the result has
// no values (its device is "meta") and may only be passed to other units. A value that a stage
// needs from an earlier stage must be an input of the stage's first unit.
PENSTOCK_API at::Tensor unit(
    const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& forward);

// Runs the layer's forward. If the ranks of `mesh.tensor` compute it together, "parallel.rules"
// decide how (src/engine/mesh/tensor_ranks.h). Every cut layer must have been called this way
// before the first step; otherwise step() throws.
PENSTOCK_API at::Tensor linear(const torch::nn::LinearImpl& layer, const at::Tensor& input);
PENSTOCK_API at::Tensor embedding(const torch::nn::EmbeddingImpl& layer, const at::Tensor& ids);

}  // namespace penstock
