#pragma once
// BackwardEnd: ends a backward that raised (in model code or in the engine), or that reached no
// hook of this rank. Used only by the model's thread, or by autograd's thread while a backward
// runs.
#include <cstdint>
#include <memory>

#include "src/engine/step/core_state.h"

namespace penstock {

struct Core::State::BackwardEnd {
  // Autograd keeps a guard while a backward runs, and frees it at the end or when the backward
  // raises.
  struct BackwardGuard {
    std::weak_ptr<State> state;
    std::shared_ptr<void> running;  // keeps other threads out
    bool begun = false, ended = false;

    BackwardGuard(std::weak_ptr<State> of, std::shared_ptr<void> thread);
    ~BackwardGuard();
  };

  // Must run before a call that changes the window. If model code raised in the last backward, that
  // backward ends here. As in torch, its gradients stay, and it counts as a backward. If the engine
  // raised in it, some sums are incomplete. In that case, drops the window if `drops` is set and
  // the window has no other backward; if not, throws RuntimeFault until zero_grad() is called.
  void after_error(const char* call, bool drops);
  // Counts the last backward if it reached no hook of this rank. Returns whether that backward was
  // counted.
  bool unseen();
  // Ends a backward of a pipeline stage, even if it reached no trainable parameter of this rank.
  void of_stage(int64_t micro);

  State& state;
};

}  // namespace penstock
