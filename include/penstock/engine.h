#pragma once
// Engine: the C++ front. Trains a torch::nn::Module without Python.
//
//   penstock::Engine engine(model, penstock::Config::parse(json_text), group);
//   auto loss = engine.run([&] { return model->forward(x, y); });
//   engine.backward(loss);
//   engine.step();
//
// torch::nn modules have no forward hooks, so a module whose parameters should move as a unit of
// its own says so in its forward (without it the whole model is one unit, and just as right); so
// does a large layer, where it is used: penstock::unit(*embed, [&] { return embed(x); }):
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

// One per model and rank; all calls from the rank's thread. Methods marked [all ranks] are
// collective. Errors as in penstock/error.h.
class PENSTOCK_API Engine {
 public:
  // [all ranks] The optimizer and its schedule come from the config. Units are the modules whose
  // class is named in `config.units.modules`, or repeated blocks, and large layers beside them.
  Engine(const std::shared_ptr<torch::nn::Module>& model, const Config& config,
         std::shared_ptr<Group> group = Group::alone());
  ~Engine();

  // [all ranks] Runs a forward; returns what it returns.
  at::Tensor run(const std::function<at::Tensor()>& forward);
  // Any number of times before step(); gradients add up.
  void backward(const at::Tensor& loss);
  // [all ranks] True when the weights changed (see Config::batch.accumulate); `force` closes the
  // window early.
  bool step(bool force = false);

  // [all ranks] Forwards, backwards and the step of one window: loss_of(i) is the loss of the i-th
  // of `batch.accumulate` micro-batches of data_rank()'s samples. On every mesh; in a pipeline it
  // is the only way, and loss_of() is the model's forward, in units that are given their inputs.
  // Returns the mean loss over all micro-batches and data ranks.
  double train_batch(const std::function<at::Tensor(int)>& loss_of);
  // [all ranks] The mean loss alone, without gradients and in eval mode.
  double eval_batch(const std::function<at::Tensor(int)>& loss_of);
  // Ranks that compute one model together are one of data_size().
  int data_rank() const;
  int data_size() const;

  double grad_norm() const;  // of the last applied step, averaged gradient, before clipping
  double lr() const;         // of the next step
  LedgerReport ledger() const;
  // Of the last step, and timelines; samples and tokens are counted by Metrics::count().
  Metrics metrics() const;
  std::string explain() const;
  // [all ranks] Full fp32 weights by name.
  std::vector<std::pair<std::string, at::Tensor>> state();
  // [all ranks] Saves below `path` (penstock/checkpoint.h), between step() and a backward: weights,
  // optimizer, buffers, torch's generator. `client_state` is JSON, which load() gives back; without
  // `wait` it is written while training goes on. Returns the checkpoint's path.
  std::string save(const std::string& path, const std::string& tag = "",
                   const std::string& client_state = "null", bool wait = true);
  // [all ranks] The newest that is whole, or that of the tag; of any layout, also one that Python
  // saved. Returns its client_state.
  std::string load(const std::string& path, const std::string& tag = "");
  // [all ranks] The model has ordinary full parameters again. Without `gather` it has none: for
  // what is larger than memory; no peer is needed then.
  void close(bool gather = true);

 private:
  struct Impl;
  std::unique_ptr<Impl> state_;
};

// Runs `forward` as the unit that `module` is in the engine whose run() is on this thread's stack;
// outside of one it just runs it.
PENSTOCK_API at::Tensor unit(const torch::nn::Module& module,
                             const std::function<at::Tensor()>& forward);

// The same of a unit that is given its inputs, as stages of a pipeline need it ("mesh.pipeline"):
// `forward(inputs)` runs where the module's stage is. On later stages what it returns has no values
// (its device is "meta") and may go only into other units' inputs; what a stage needs of an earlier
// one has to be an input of the unit that it begins with.
PENSTOCK_API at::Tensor unit(
    const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& forward);

// The layer's forward in that engine: where ranks of `mesh.tensor` compute it together, by the
// style that "parallel.rules" give it (penstock/tensor_ranks.h), else its own. A layer that is cut
// and was not called so before the first step is an error.
PENSTOCK_API at::Tensor linear(const torch::nn::LinearImpl& layer, const at::Tensor& input);
PENSTOCK_API at::Tensor embedding(const torch::nn::EmbeddingImpl& layer, const at::Tensor& ids);

}  // namespace penstock
