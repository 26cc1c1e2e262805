#pragma once
// Residuals of a lossy wire in checkpoints and in param_state() ([Note: Residuals]). The values are
// in fp32. They are the amounts that the residual will add to the averaged gradient of a later
// update.
#include <memory>
#include <utility>
#include <vector>

#include "penstock/config.h"

#include "src/engine/model/flat_state.h"
#include "src/exec/executor.h"

namespace penstock::engine {

// Returns the divisor of the gradient sums of a full window, without the loss scale.
double residual_divisor(const Config& config);

// `divisor`: residual_divisor().
class ResidualState {
 public:
  ResidualState(exec::Executor& executor, int rank, double divisor)
      : executor_(executor), rank_(rank), divisor_(divisor) {}

  // [all ranks] Returns this rank's parts of the residuals. Leaves out residuals that are zero on
  // every rank.
  FlatParts parts() const;

  // Returns parts that are zero, to be filled with the residuals of a checkpoint. Returns no parts
  // if the checkpoint or the table has no residuals.
  FlatParts to_fill(const ckpt::Manifest& manifest) const;
  // Replaces all residuals by the residuals among these parts. A residual without a part becomes
  // zero.
  void take(const FlatParts& parts) const;
  bool used() const;  // whether this run keeps residuals

 private:
  std::vector<std::pair<int, exec::Flat*>> flats() const;

  exec::Executor& executor_;
  const int rank_;
  const double divisor_;
};

}  // namespace penstock::engine
