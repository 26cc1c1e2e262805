#pragma once
// Residuals of a lossy wire in checkpoints and in param_state() ([Note: Residuals]). The values are
// in fp32. They are the amounts that the residual will add to the averaged gradient of a later
// update.
#include <memory>
#include <utility>
#include <vector>

#include "penstock/config.h"

#include "src/ckpt/inventory.h"
#include "src/ckpt/load.h"
#include "src/ckpt/save.h"
#include "src/exec/executor.h"

namespace penstock::engine {

inline constexpr const char* kResidualRole = "residual";  // of tensors in checkpoints

// This rank's part of one flat's residual.
struct ResidualPart {
  exec::Flat* flat = nullptr;
  at::Tensor values;  // fp32, in host memory
  // Without memory: describes `values` as state that this rank holds.
  exec::Buffer shape;
  ckpt::Holding holding{};
};

using ResidualParts = std::vector<std::unique_ptr<ResidualPart>>;

// Returns the divisor of the gradient sums of a full window, without the loss scale.
double residual_divisor(const Config& config);

// `divisor`: residual_divisor().
class ResidualState {
 public:
  ResidualState(exec::Executor& executor, int rank, double divisor)
      : executor_(executor), rank_(rank), divisor_(divisor) {}

  // [all ranks] Returns this rank's parts of the residuals. Leaves out residuals that are zero on
  // every rank.
  ResidualParts parts() const;
  // [all ranks] Returns the tensors to save.
  std::vector<ckpt::Extra> to_save(const ckpt::GlobalOf& names) const;

  // Returns parts that are zero, to be filled with the residuals of a checkpoint. Returns no parts
  // if the checkpoint or the table has no residuals.
  ResidualParts to_fill(const ckpt::Manifest& manifest) const;
  // Returns the pieces of these parts that the checkpoint has. They share memory with the parts.
  std::vector<ckpt::Extra> wanted(const ResidualParts& parts, const ckpt::Manifest& manifest,
                                  const ckpt::GlobalOf& names) const;
  // Replaces all residuals by these parts. A residual without a part becomes zero.
  void take(const ResidualParts& parts) const;
  // Returns whether the checkpoint has residuals that this run cannot use.
  bool loses(const ckpt::Manifest& manifest) const;

 private:
  std::vector<std::pair<int, exec::Flat*>> flats() const;
  std::unique_ptr<ResidualPart> part(int unit, exec::Flat& flat, at::Tensor values) const;

  exec::Executor& executor_;
  const int rank_;
  const double divisor_;
};

}  // namespace penstock::engine
