#pragma once
// Engine: the C++ front. Trains a torch::nn::Module without Python.
//
//   penstock::Engine engine(model, penstock::Config::parse(json_text), group);
//   auto loss = engine.run([&] { return model->forward(x, y); });
//   engine.backward(loss);
//   engine.step();
//
// torch::nn modules have no forward hooks. A module whose parameters should move as one unit
// therefore wraps its forward in penstock::unit(). Without that call the whole model is one unit,
// with the same results. A large layer is wrapped where it is used: penstock::unit(*embed, [&] {
// return embed(x); }).
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
// collective. Errors: penstock/error.h.
class PENSTOCK_API Engine {
 public:
  // [all ranks] The optimizer and its schedule come from the config. Units are the modules whose
  // class is in `config.units.modules`, or else repeated blocks, and large layers outside them.
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
  // returns the loss of the i-th of `batch.accumulate` micro-batches of data_rank()'s samples.
  // Works on every mesh. A pipeline can be trained in no other way; there loss_of() is the model's
  // forward, made of units that are given their inputs. Returns the mean loss over all
  // micro-batches and data ranks.
  double train_batch(const std::function<at::Tensor(int)>& loss_of);
  // [all ranks] Returns the mean loss without computing gradients, in eval mode.
  double eval_batch(const std::function<at::Tensor(int)>& loss_of);
  // Index and number of data ranks. Ranks that compute one model together are one data rank.
  int data_rank() const;
  int data_size() const;

  double grad_norm() const;  // of the last applied step, averaged gradient, before clipping
  double lr() const;         // of the next step
  LedgerReport ledger() const;
  // Metrics of the last step, and timelines. Metrics::count() counts samples and tokens.
  Metrics metrics() const;
  std::string explain() const;
  // [all ranks] Returns full fp32 weights by name.
  std::vector<std::pair<std::string, at::Tensor>> state();
  // [all ranks] Saves below `path` (penstock/checkpoint.h), between step() and a backward: weights,
  // optimizer, buffers, torch's generator. load() returns `client_state`, which is JSON. Without
  // `wait` the files are written while training continues. Returns the checkpoint's path.
  std::string save(const std::string& path, const std::string& tag = "",
                   const std::string& client_state = "null", bool wait = true);
  // [all ranks] Loads the newest complete checkpoint, or the one with the tag; any layout, also one
  // that Python saved. Returns its client_state.
  std::string load(const std::string& path, const std::string& tag = "");
  // [all ranks] Gives the model ordinary full parameters again. Without `gather` sharded parameters
  // have no values afterwards and no peer is needed: for models larger than memory.
  void close(bool gather = true);

 private:
  struct Impl;
  std::unique_ptr<Impl> state_;
};

// Runs `forward` as the unit `module` of the engine whose run() is on this thread's stack. Outside
// run() it only calls `forward`.
PENSTOCK_API at::Tensor unit(const torch::nn::Module& module,
                             const std::function<at::Tensor()>& forward);

// The same for a unit that is given its inputs, as pipeline stages need it ("mesh.pipeline").
// `forward(inputs)` runs on the ranks that have the module's stage. On other ranks the result has
// no values (its device is "meta") and may only be an input of other units. A value that a stage
// needs from an earlier stage must be an input of the stage's first unit.
PENSTOCK_API at::Tensor unit(
    const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& forward);

// Runs the layer's forward. If the ranks of `mesh.tensor` compute it together, it has the style
// that "parallel.rules" give it (src/engine/mesh/tensor_ranks.h); otherwise it is the layer's own
// forward. A layer that is cut must be called this way before the first step; otherwise step()
// throws.
PENSTOCK_API at::Tensor linear(const torch::nn::LinearImpl& layer, const at::Tensor& input);
PENSTOCK_API at::Tensor embedding(const torch::nn::EmbeddingImpl& layer, const at::Tensor& ids);

}  // namespace penstock
