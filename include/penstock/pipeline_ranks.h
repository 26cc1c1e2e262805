#pragma once
// PipelineRanks: ranks that compute one model one after the other, each some stages of it (config
// keys "mesh.pipeline" and "parallel"). Docs: docs/parallel.md.
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

// A module that one stage computes, with all that is in it.
struct StagePiece {
  std::string module;
  int stage = 0;
};

// One stage computes one micro-batch in one direction.
struct StageAction {
  int stage = 0;
  bool forward = true;
  int micro = 0;
};

// A buffer of a module, which forwards of its stage may change.
struct StageBuffer {
  std::string name;
  int stage = 0;
  at::Tensor values;
};

// What a stage hands to its neighbour: CPU tensors of any shapes (an undefined one arrives as such)
// and a text.
struct StageMessage {
  std::string text;
  std::vector<at::Tensor> tensors;
};

// A view of a core with mesh.pipeline > 1, for the thread that runs the model. All ranks call
// begin() and end() together, and in between each makes its actions in the order that begin() gave.
class PENSTOCK_API PipelineRanks {
 public:
  // Throws ConfigError where there is one stage.
  explicit PipelineRanks(const Core& core);

  int index() const;
  int count() const;
  int num_stages() const;
  const std::vector<StagePiece>& pieces() const;  // in model order

  // A window of so many micro-batches: what this rank computes, in order. Without `trains` forwards
  // alone. Throws ConfigError where the schedule is not for so many; RuntimeFault where the window
  // before was cut short.
  std::vector<StageAction> begin(int num_micro, bool trains);
  // What `action` needs of the stage before it (after it, where it goes backward); waits for it.
  // Throws RuntimeFault: a peer that is gone.
  StageMessage receive(const StageAction& action);
  // What `action` made, for the stage after it (before it). Returns at once: the tensors are not to
  // be changed until end().
  void send(const StageAction& action, const StageMessage& made);
  // After every backward, whatever parameters of this rank it came by.
  void end_backward();
  // All that was sent has arrived.
  void end();

  // Before close(), and bring_buffers(): on every rank the same ones.
  void set_buffers(std::vector<StageBuffer> buffers);
  // [all ranks] Those that were set become their stage's, in place. Throws RuntimeFault where ranks
  // have others.
  void bring_buffers();

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
