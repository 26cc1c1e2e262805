#pragma once
// PipelineRanks: the ranks that compute successive parts of one model. Each rank computes one or
// more stages (config keys "mesh.pipeline" and "parallel"). Docs: docs/parallel.md.
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"
#include "src/plan/pipeline_schedule.h"

namespace penstock {

// A module that one stage computes, including its submodules.
struct StagePiece {
  std::string module;
  int stage = 0;
};

// A module's buffer. A forward of the stage may change its values.
struct StageBuffer {
  std::string name;
  int stage = 0;
  at::Tensor values;
};

// A message from a stage to its neighbour: CPU tensors of any shapes and a text. An undefined
// tensor arrives undefined.
struct StageMessage {
  std::string text;
  std::vector<at::Tensor> tensors;
};

// A view of a core with mesh.pipeline > 1, for the model's thread. All ranks call begin() and end()
// together. Between these calls each rank runs its actions in the order that begin() returned.
class PENSTOCK_API PipelineRanks {
 public:
  // Throws ConfigError if there is only one stage.
  explicit PipelineRanks(const Core& core);

  int index() const;
  int count() const;
  int num_stages() const;
  const std::vector<StagePiece>& pieces() const;  // in model order

  // Begins an accumulation window of `num_micro` micro-batches and returns this rank's actions in
  // order. If `trains` is false, there are only forwards. Throws ConfigError if the schedule does
  // not allow this number of micro-batches. Throws RuntimeFault if an error ended the previous
  // window, or if that window was not applied.
  std::vector<Action> begin(int num_micro, bool trains);
  // Must be called before each action's forward or backward, in the order of begin(). Throws
  // RuntimeFault if another action is next.
  void start(const Action& action);
  // Waits for the message that `action` needs. It comes from the previous stage or, for a backward,
  // from the next stage. Throws RuntimeFault if the peer is gone.
  StageMessage receive(const Action& action);
  // Sends the result of `action` to the next stage or, for a backward, to the previous stage.
  // Returns at once. The tensors must not change until end().
  void send(const Action& action, const StageMessage& made);

  // What a stage's backward starts from and where it ends.
  struct StageGraph {
    std::vector<at::Tensor> outputs;    // of the stage, without those that need no gradient
    std::vector<at::Tensor> gradients;  // of `outputs`; undefined: 1
    std::vector<at::Tensor> inputs;     // leaves at which the gradients for the previous stage end
  };
  // Run the two parts of a split backward (SplitBackward). backward_inputs() keeps the graph until
  // backward_weights() has run.
  void backward_inputs(const Action& action, StageGraph graph);
  void backward_weights(const Action& action);
  // Must be called after every backward of all gradients or of weights, even if the backward
  // reached no parameter of this rank.
  void end_backward(const Action& action);
  // Waits until all messages have arrived.
  void end();

  // [pipeline] Returns, after end(), the last stage's outputs on every rank of the pipeline. `own`
  // counts on the last stage's rank only. Throws RuntimeFault if a peer is gone.
  StageMessage share_outputs(const StageMessage& own);

  // Sets the buffers that bring_buffers() copies. Must be called before bring_buffers() and
  // close(), with the same buffers on every rank.
  void set_buffers(std::vector<StageBuffer> buffers);
  // [all ranks] Overwrites each of these buffers in place with the values of the buffer's stage.
  // Throws RuntimeFault if the ranks set different buffers.
  void bring_buffers();

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
